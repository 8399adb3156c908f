// Memory for the checks: at any address, with guards around it; and how checks report.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/element.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, nbytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, nbytes) static_cast<void>(0)
#endif

namespace checks {

inline long num_checks = 0;
inline std::mt19937 random_bits(1);

inline int pick(int low, int high) { // both ends included
  return low + static_cast<int>(random_bits() % static_cast<unsigned>(high - low + 1));
}

inline void expect(bool condition, const char* what, long where, long numel) {
  ++num_checks;
  if (!condition) {
    std::fprintf(stderr, "%s: tensor %ld of %ld elements\n", what, where, numel);
    std::exit(1);
  }
}

inline bool same_bits(const void* a, const void* b, size_t nbytes) {
  return std::memcmp(a, b, nbytes) == 0;
}

// `numel` elements that begin `past` elements behind a multiple of 64 bytes. Bytes around them are
// never read, which AddressSanitizer sees, nor written, which intact() sees without it.
template <typename T>
class Buffer {
 public:
  Buffer(int64_t numel, int past) : numel_(numel), begin_(kGuard + past * sizeof(T)) {
    total_ = begin_ + numel * sizeof(T) + kGuard;
    memory_.reset(
        static_cast<unsigned char*>(
            std::aligned_alloc(kGuard, (total_ + kGuard - 1) / kGuard * kGuard)));
    std::memset(memory_.get(), kFilling, total_);
    for (int64_t i = 0; i < numel; ++i) {
      data()[i] = static_cast<T>(static_cast<float>(pick(-1000, 1000)) / 1024.0F);
    }
    ASAN_POISON_MEMORY_REGION(memory_.get(), begin_);
    ASAN_POISON_MEMORY_REGION(memory_.get() + end(), total_ - end());
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), total_);
  }

  T* data() {
    return reinterpret_cast<T*>(memory_.get() + begin_);
  }
  T& operator[](int64_t index) {
    return data()[index];
  }
  int64_t numel() const {
    return numel_;
  }
  std::vector<T> copy() {
    return {data(), data() + numel_};
  }
  bool intact() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), total_);
    const auto is_filling = [](unsigned char byte) { return byte == kFilling; };
    const unsigned char* all = memory_.get();
    return std::all_of(all, all + begin_, is_filling) &&
        std::all_of(all + end(), all + total_, is_filling);
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kFilling = 0x5a;
  struct Free {
    void operator()(void* memory) const {
      std::free(memory);
    }
  };

  size_t end() const {
    return begin_ + static_cast<size_t>(numel_) * sizeof(T);
  }

  int64_t numel_;
  size_t begin_;
  size_t total_;
  std::unique_ptr<unsigned char, Free> memory_;
};

template <typename T>
using Buffers = std::vector<std::unique_ptr<Buffer<T>>>;

// Sizes around those where vectors, blocks and chunks end.
inline int some_numel(int index) {
  static constexpr int kSmall[] = {1, 3, 7, 8, 9, 31, 129, 1000};
  static constexpr int kLarge[] = {8191, 8192, 8193, 33'001};
  return index % 40 == 1 ? kLarge[pick(0, 3)] : kSmall[pick(0, 7)];
}

// Elements behind an aligned address: none for half of the buffers.
inline int some_past() {
  return pick(0, 1) == 0 ? 0 : pick(0, 9);
}

template <typename T>
constexpr zerocore::kernels::Element element_of() {
  using zerocore::kernels::Element;
  return std::is_same_v<T, float>    ? Element::Float
      : std::is_same_v<T, double>    ? Element::Double
      : std::is_same_v<T, c10::Half> ? Element::Half
      : std::is_same_v<T, uint8_t>   ? Element::Byte
                                     : Element::BFloat16;
}

// The type that the kernels compute in on their way to T.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

void check_copies();
void check_sums();
void check_norms();
void check_scaled();
void check_adamw();
void check_sectors();

} // namespace checks
