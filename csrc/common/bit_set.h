// A set of small numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zerocore {

class BitSet {
 public:
  void add(int index) {
    words_.resize(std::max(words_.size(), word_of(index) + 1));
    words_[word_of(index)] |= bit_of(index);
  }
  void remove(int index) {
    if (word_of(index) < words_.size()) {
      words_[word_of(index)] &= ~bit_of(index);
    }
  }
  bool contains(int index) const {
    return word_of(index) < words_.size() && (words_[word_of(index)] & bit_of(index)) != 0;
  }
  void add_all(const BitSet& other) {
    words_.resize(std::max(words_.size(), other.words_.size()));
    for (size_t i = 0; i < other.words_.size(); ++i) {
      words_[i] |= other.words_[i];
    }
  }

 private:
  static size_t word_of(int index) {
    return static_cast<size_t>(index) / 64;
  }
  static uint64_t bit_of(int index) {
    return uint64_t{1} << (static_cast<unsigned>(index) % 64);
  }

  std::vector<uint64_t> words_;
};

} // namespace zerocore
