// The memory of the other ranks of a group, where all are processes of one machine.
//
// Note [Reads of peers]
// Gloo moves bytes through sockets, also within a machine. There a rank can copy the others' shards
// straight out of their memory, which takes less than half of the time, and rows go to their places
// at once. All ranks come in with the address of their shard, which tells that it has its values;
// all read; none goes on before all have read, so that it may change its shard then. That takes
// two small messages, and leaves no collective under way that a layer could overlap with. Units
// that are held, as by exports, are gathered like this; those of a step are not.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace zerocore {

// Bytes of a rank's part, at least one, and where they belong among those of all.
struct PeerBytes {
  int64_t rank = 0; // of the group
  int64_t from = 0; // in its part
  int64_t to = 0; // among all
  int64_t nbytes = 0;
};

class PeerMemory {
 public:
  // Collective over a gloo group, on the CPU. Each rank tries to read a random number of each other
  // one; null on all ranks unless all could. Throws what the group throws.
  static std::unique_ptr<PeerMemory> find(const c10::intrusive_ptr<c10d::Backend>& backend);

  // Copies the other ranks' pieces to `full`; `own` is this rank's part. Collective; blocks until
  // nobody reads `own` any more. Throws std::system_error that names a rank which cannot be read,
  // and what the group throws.
  void read(const void* own, void* full, const std::vector<PeerBytes>& pieces) const;

 private:
  explicit PeerMemory(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  void read_rank(int64_t rank, uint64_t address, void* full, const std::vector<PeerBytes>& pieces)
      const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<int64_t> processes_; // by rank
};

} // namespace zerocore
