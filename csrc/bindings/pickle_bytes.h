// The bytes of a pickle, which refuse what is truncated.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace zerocore {

[[noreturn]] inline void refuse(const char* why) {
  throw std::invalid_argument(why); // ValueError in Python
}

// Bytes that are still to be read.
class PickleBytes {
 public:
  explicit PickleBytes(std::string_view data) : data_(data) {}

  std::string_view take(size_t nbytes) {
    if (nbytes > data_.size()) {
      refuse("it is truncated");
    }
    const std::string_view taken = data_.substr(0, nbytes);
    data_.remove_prefix(nbytes);
    return taken;
  }
  // Little-endian.
  uint32_t number(size_t nbytes) {
    uint32_t value = 0;
    int shift = 0;
    for (const char byte : take(nbytes)) {
      value |= static_cast<uint32_t>(static_cast<uint8_t>(byte)) << shift;
      shift += 8;
    }
    return value;
  }
  std::string_view counted(size_t nbytes) {
    return take(number(nbytes));
  }
  std::string_view line() {
    const std::string_view text = take(data_.find('\n') + 1); // of no line: npos + 1 is 0
    if (text.empty()) {
      refuse("it is truncated");
    }
    return text.substr(0, text.size() - 1);
  }

 private:
  std::string_view data_;
};

} // namespace zerocore
