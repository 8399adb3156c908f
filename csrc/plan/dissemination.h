// Combines the messages of all ranks on every rank, in a logarithmic number of hops; integers only.
//
// Note [Dissemination]
// In hop k each rank sends its combined message to the rank 2^k after it, and receives from the
// rank 2^k before it. After ceil(log2 N) hops every rank has heard all N ranks, over connections to
// at most 2 ceil(log2 N) of them. If N is not a power of two, a rank hears some ranks twice. So
// messages are combined by a maximum, an or, or a union: repeating an operand changes nothing. If
// ranks send different kinds of messages, all ranks end with MessageKind::Different.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zerocore {

enum class MessageKind : int64_t {
  Hello, // the first message over a connection
  Pass, // a rank's calls in a pass: kPassNumbers numbers (their maximum), then flags
  Collective, // the collective that a rank is about to issue: the maximum of each number
  AnyFlags, // this kind and the next two are flags, combined by or
  UsedFlags,
  OptimizerFlags,
  Lists, // the union of the ranks' lists of numbers
  Different,
};

// The first words of a Pass are numbers; the others are flags.
constexpr size_t kPassNumbers = 9;

struct ControlMessage {
  MessageKind kind = MessageKind::Hello;
  int64_t user = 0; // number of the channel that shares the link; must be equal on all ranks
  // The number of words; for Lists, of one list. Must be equal on all ranks.
  int64_t width = 0;
  // Lists lie one after the other, sorted by the lowest rank that has each list. The first word of
  // a list is that rank.
  std::vector<int64_t> words;

  static ControlMessage of(MessageKind kind, std::vector<int64_t> words);
  // Returns a message with one bit for each flag.
  static ControlMessage of_flags(MessageKind kind, const std::vector<bool>& flags);
  void add_flags(const std::vector<bool>& flags);
  // Returns `count` flags, which begin with the word `first`.
  std::vector<bool> flags(size_t count, size_t first = 0) const;
  // Merges another message into this one.
  void combine(const ControlMessage& other);
};

// One rank's part in the exchange.
class Dissemination {
 public:
  Dissemination(int64_t rank, int64_t size, ControlMessage own)
      : rank_(rank), size_(size), heard_(std::move(own)) {}

  // Returns ceil(log2 size).
  static int num_hops(int64_t size);
  // Returns the ranks that `rank` sends to or receives from, in ascending order.
  static std::vector<int64_t> peers(int64_t rank, int64_t size);

  // A connection of a rank in a hop: to the rank that it sends to, or to the rank that it hears.
  struct Connection {
    int hop = 0;
    bool sends = false;
  };
  // Returns the order in which the rank makes its connections. Each end of a connection waits for
  // the other, so all ranks follow one order of connections. Neighbours in this order share few
  // ranks, so that many connections are made at a time.
  static std::vector<Connection> connections(int64_t rank, int64_t size);

  // Returns the next hop, from 0 on.
  int hop() const {
    return hop_;
  }
  bool is_done() const {
    return hop_ == num_hops(size_);
  }
  // Return the rank that this one sends to in a hop, and the rank that it hears.
  int64_t to(int hop) const {
    return (rank_ + (int64_t{1} << hop)) % size_;
  }
  int64_t from(int hop) const {
    return (rank_ - (int64_t{1} << hop) + size_) % size_;
  }
  // Returns the message to send in the next hop; after the last hop, the message of all ranks.
  const ControlMessage& heard() const {
    return heard_;
  }
  // Ends the hop with the received message.
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
