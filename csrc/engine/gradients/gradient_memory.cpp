// Memory for the gradients of one region.
#include "engine/gradients/gradient_memory.h"

#include "engine/unit/host_states.h"

namespace zerocore {

namespace {

// One that was frozen when the model was sharded has memory apart.
const HostStates* host_of(const Unit& unit, int region) {
  const UnitContext& context = unit.context();
  const bool is_planned = unit.layout().regions()[region].requires_grad;
  return context.tiers.gradients == Tier::Host && is_planned ? context.host : nullptr;
}

} // namespace

GradientMemory::GradientMemory(const Unit& unit, int index)
    : context_(unit.context()),
      mesh_(context_.mesh),
      unit_(unit.id()),
      region_(index),
      host_(host_of(unit, index)),
      home_(mesh_.shards_gradients ? Memory::Kept : Memory::FullGrad) {
  const Region& region = unit.layout().regions()[index];
  const Layout kept = unit.layout().retyped(&Region::grad);
  const Layout sent = unit.layout().retyped(&Region::reduce);
  const bool on_host = context_.tiers.gradients == Tier::Host;
  const auto make = [&](Memory place, const Layout& layout, int64_t shard) {
    buckets_[place].emplace(
        layout,
        std::vector<int>{index},
        shard,
        place == home_ && on_host ? c10::Device(c10::kCPU) : context_.streams->device(),
        "the gradient of unit '" + unit.name() + "'");
  };
  make(Memory::FullGrad, kept, mesh_.shard());
  if (home_ == Memory::Kept) {
    make(Memory::Kept, kept.of_shard(mesh_.shard()), 0);
  } else {
    home_begin_ = region.shard_range(mesh_.shard()).begin;
  }
  if (context_.registered != nullptr && region.requires_grad && !on_host) {
    context_.registered->reserve(Window::Gradients, home().bytes());
  }
  if (context_.collectives != nullptr) {
    make(Memory::Scratch, mesh_.parts() > 1 ? sent : sent.of_shards(mesh_.num_across()), 0);
    if (mesh_.sums_in_order) {
      make(Memory::Sums, kept.of_shards(mesh_.num_across() * (mesh_.sums_across() ? 2 : 1)), 0);
      cut_sums(region);
    } else if (mesh_.shards_across) {
      cut_scratch(region);
    }
    if (mesh_.sums_in_order || region.has_wire()) {
      make(Memory::Wire, sent, mesh_.shard());
    }
  }
}

// The reduction over the replicas leaves its result in place, or behind the part.
void GradientMemory::cut_scratch(const Region& region) {
  const Bucket& scratch = bucket(Memory::Scratch);
  const int64_t numel = region.shard_numel * mesh_.num_across();
  const bool in_place = mesh_.replicas.parts() == 1;
  part_ = scratch.view(region_, 0, {numel});
  across_ = in_place
      ? scratch.view(region_, mesh_.replicas.rank * region.shard_numel, {region.shard_numel})
      : scratch.view(region_, numel, {numel});
}

// The part that a rank keeps, and behind it the sums that come from the replicas.
void GradientMemory::cut_sums(const Region& region) {
  const int64_t numel = region.shard_numel * mesh_.num_across();
  cut_ = Memory::Sums;
  part_ = bucket(cut_).view(region_, 0, {numel});
  if (mesh_.sums_across()) {
    across_ = bucket(cut_).view(region_, numel, {region.numel() / mesh_.state.size});
  }
}

at::Tensor GradientMemory::summed(Memory place, int64_t numel) const {
  const at::Tensor& kept = own(place);
  if (!mesh_.sums_in_order || kept.numel() == numel) {
    return kept;
  }
  const int64_t within = whole(Memory::Scratch).numel() / mesh_.state.size;
  const int64_t begin = mesh_.shards_optimizer ? 0 : mesh_.state.rank * within;
  return kept.narrow(0, begin + (numel < within ? mesh_.replicas.rank * numel : 0), numel);
}

const at::Tensor& GradientMemory::whole(Memory place) const {
  return place == Memory::Across ? across_ : bucket(place).full(region_);
}

const at::Tensor& GradientMemory::own(Memory place) const {
  if (place == Memory::Across) {
    return across_;
  }
  if (place == cut_ && part_.defined()) {
    return part_;
  }
  return (place == Memory::Kept ? home() : bucket(place)).own(region_);
}

at::Tensor GradientMemory::view(int64_t begin, at::IntArrayRef sizes) const {
  return home().view(region_, home_begin_ + begin, sizes);
}

void GradientMemory::keep() {
  if (!is_kept() && host_ != nullptr) {
    bucket(home_).attach(host_->gradient(unit_, region_));
  } else if (!is_kept()) {
    const at::Tensor bytes = home().bytes();
    bucket(home_).attach(context_.memory_for(bytes));
    bytes.zero_();
  }
}

void GradientMemory::take(const GradStep& step, BucketPool& pool) {
  Slot& slot = slots_[step.to];
  TORCH_INTERNAL_ASSERT(step.nbytes == bucket(step.to).nbytes());
  const bool is_received = step.to == Memory::Scratch;
  const StreamRole user = is_received ? StreamRole::ReduceScatter : StreamRole::Compute;
  slot = pool.acquire(block_of(step), step.nbytes, user);
  bucket(step.to).attach(slot.data);
}

void GradientMemory::give_back(const GradStep& step, BucketPool& pool) {
  Slot& slot = slots_[step.from];
  if (slot.held()) {
    bucket(step.from).detach();
    pool.release(slot, step.last_use);
  }
}

} // namespace zerocore
