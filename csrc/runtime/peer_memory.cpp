// The memory of the other ranks of a group.
#include "runtime/peer_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <unistd.h>

#include <random>
#include <string>
#include <system_error>

#include "io/process_memory.h"

namespace zerocore {

namespace {

// The ranks' numbers, by rank; blocks. The same count on all of them.
at::Tensor exchange(c10d::Backend& backend, const std::vector<int64_t>& numbers) {
  at::Tensor own = at::tensor(numbers);
  at::Tensor all = at::empty({backend.getSize(), own.numel()}, own.options());
  at::Tensor flat = all.view({-1});
  backend._allgather_base(flat, own)->wait();
  return all;
}

} // namespace

std::unique_ptr<PeerMemory> PeerMemory::find(const c10::intrusive_ptr<c10d::Backend>& backend) {
  std::random_device random;
  // A process of this number may also be on another machine, or in another container.
  const int64_t secret = static_cast<int64_t>(random()) << 32 | random();
  io::admit_siblings();
  const auto address = reinterpret_cast<int64_t>(&secret);
  const at::Tensor found = exchange(*backend, {::getpid(), address, secret});
  const auto facts = found.accessor<int64_t, 2>();
  std::unique_ptr<PeerMemory> peers(new PeerMemory(backend));
  bool all_read = true;
  for (int64_t rank = 0; rank < facts.size(0); ++rank) {
    peers->processes_.push_back(facts[rank][0]);
    int64_t read = 0;
    try {
      io::read_process(
          facts[rank][0], {{static_cast<uint64_t>(facts[rank][1]), &read, sizeof(read)}});
    } catch (const std::system_error&) {
      all_read = false;
    }
    all_read = all_read && read == facts[rank][2];
  }
  return exchange(*backend, {all_read}).all().item<bool>() ? std::move(peers) : nullptr;
}

void PeerMemory::read(const void* own, void* full, const std::vector<PeerBytes>& pieces) const {
  const at::Tensor addresses = exchange(*backend_, {reinterpret_cast<int64_t>(own)});
  const int64_t num_ranks = backend_->getSize();
  for (int64_t step = 1; step < num_ranks; ++step) { // not all from the same one at a time
    const int64_t rank = (backend_->getRank() + step) % num_ranks;
    read_rank(rank, static_cast<uint64_t>(addresses[rank].item<int64_t>()), full, pieces);
  }
  exchange(*backend_, {0});
}

void PeerMemory::read_rank(
    int64_t rank,
    uint64_t address,
    void* full,
    const std::vector<PeerBytes>& pieces) const {
  std::vector<io::ForeignBytes> wanted;
  for (const PeerBytes& piece : pieces) {
    if (piece.rank == rank) {
      wanted.push_back(
          {address + piece.from,
           static_cast<char*>(full) + piece.to,
           static_cast<size_t>(piece.nbytes)});
    }
  }
  try {
    io::read_process(processes_[rank], wanted);
  } catch (const std::system_error& error) {
    throw std::system_error(
        error.code(), "cannot read memory of the group's rank " + std::to_string(rank));
  }
}

} // namespace zerocore
