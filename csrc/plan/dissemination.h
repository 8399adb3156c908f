// How all ranks hear what any of them says: one hop after the other; integers only.
//
// Note [Dissemination]
// In hop k a rank sends what it has heard so far to the rank 2^k behind it, and hears the one 2^k
// before it. After ceil(log2 N) hops every rank has heard all N, whatever N is, over connections to
// 2 ceil(log2 N) other ranks at most. Where N is no power of two a rank hears some of the others
// twice, so two messages are combined in a way that does not count: a maximum, an or, a union.
// Ranks whose messages are not alike all end with MessageKind::Different.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zerocore {

enum class MessageKind : int64_t {
  Hello, // connects
  Pass, // what a rank does in a pass: kPassNumbers numbers as below, then bits as of flags
  Collective, // it is about to issue: the largest numbers
  AnyFlags, // the next three are bits, of which any rank's count
  UsedFlags,
  OptimizerFlags,
  Lists, // of numbers, of which each different one is kept
  Different,
};

// Words of a Pass of which the largest counts; the others are bits.
constexpr size_t kPassNumbers = 9;

struct ControlMessage {
  MessageKind kind = MessageKind::Hello;
  int64_t user = 0; // of those that share the ranks: the same on all ranks, or they differ
  // The number of words, of a union that of one list: the same on all ranks, or they differ.
  int64_t width = 0;
  // Lists of a union lie one after the other, by the lowest rank that has each, which comes first.
  std::vector<int64_t> words;

  static ControlMessage of(MessageKind kind, std::vector<int64_t> words);
  // Of which each bit is one flag.
  static ControlMessage of_flags(MessageKind kind, const std::vector<bool>& flags);
  void add_flags(const std::vector<bool>& flags);
  // `first`: the word that they begin with.
  std::vector<bool> flags(size_t count, size_t first = 0) const;
  // Both, on a rank that has heard both.
  void combine(const ControlMessage& other);
};

// One rank's part of a message of all ranks.
class Dissemination {
 public:
  Dissemination(int64_t rank, int64_t size, ControlMessage own)
      : rank_(rank), size_(size), heard_(std::move(own)) {}

  // ceil(log2 size).
  static int num_hops(int64_t size);
  // The ranks that this one is connected with, in ascending order and without itself.
  static std::vector<int64_t> peers(int64_t rank, int64_t size);

  // In which order this rank connects with those that it sends to (true) and hears (false) in each
  // hop. A rank that connects waits for the other, so all ranks go by one order of connections, in
  // which those of a hop have nearly no rank in common with the one before.
  struct Connection {
    int hop = 0;
    bool sends = false;
  };
  static std::vector<Connection> connections(int64_t rank, int64_t size);

  // The one that is next, from 0.
  int hop() const {
    return hop_;
  }
  bool is_done() const {
    return hop_ == num_hops(size_);
  }
  // Which ranks this one sends to and hears in a hop.
  int64_t to(int hop) const {
    return (rank_ + (int64_t{1} << hop)) % size_;
  }
  int64_t from(int hop) const {
    return (rank_ - (int64_t{1} << hop) + size_) % size_;
  }
  // The message of the next hop; that of all ranks if there is none.
  const ControlMessage& heard() const {
    return heard_;
  }
  // Ends the hop with what came.
  void hear(const ControlMessage& message) {
    heard_.combine(message);
    ++hop_;
  }

 private:
  int64_t rank_, size_;
  int hop_ = 0;
  ControlMessage heard_;
};

} // namespace zerocore
