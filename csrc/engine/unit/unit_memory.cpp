#include "engine/unit/unit_memory.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include "engine/unit/offloaded_states.h"

namespace zerocore {

namespace {

at::Tensor slice(const at::Tensor& all, const Axis& axis) {
  const int64_t numel = all.numel() / axis.size;
  return all.narrow(0, axis.rank * numel, numel);
}

} // namespace

UnitMemory::UnitMemory(
    UnitId unit,
    const std::string& name,
    const Layout& layout,
    const UnitContext& context)
    : unit_(unit),
      layout_(layout),
      context_(context),
      mesh_(context.mesh),
      home_(mesh_.shards_gradients ? Memory::Kept : Memory::FullGrad),
      cuts_(layout.regions().size()) {
  const std::string owner = "unit '" + name + "'";
  const std::vector<int> gathered = layout.gathered_regions();
  const int64_t shard = mesh_.shard();
  const c10::Device device = context.streams->device();
  const bool shards = mesh_.shards_parameters;
  blocks_[Memory::Full].push_back({Bucket(layout, gathered, shard, device, owner, shards)});
  blocks_[Memory::Shard].emplace_back();
  if (shards) {
    const c10::Device home = context.device_of(context.tiers.parameters);
    this->shards().emplace(layout.of_shard(shard), gathered, 0, home, owner);
  }
  if (layout.copies_out()) {
    blocks_[Memory::Received].push_back({Bucket(layout.encoded(), gathered, shard, device, owner)});
  }
  for (const Memory memory :
       {Memory::Kept, Memory::FullGrad, Memory::Wire, Memory::Scratch, Memory::Sums}) {
    blocks_[memory].resize(cuts_.size());
  }
  for (int region = 0; region < static_cast<int>(cuts_.size()); ++region) {
    add_gradients(region, "the gradient of " + owner);
  }
}

void UnitMemory::add_gradients(int index, const std::string& owner) {
  const Region& region = layout_.regions()[index];
  const Layout kept = layout_.retyped(&Region::grad);
  const Layout sent = layout_.retyped(&Region::reduce);
  const bool on_host = context_.tiers.gradients == Tier::Host;
  const auto add = [&](Memory memory, const Layout& layout, int64_t shard) {
    const c10::Device device =
        memory == home_ && on_host ? c10::Device(c10::kCPU) : context_.streams->device();
    blocks_[memory][index].bucket.emplace(layout, std::vector<int>{index}, shard, device, owner);
  };
  add(Memory::FullGrad, kept, mesh_.shard());
  if (home_ == Memory::Kept) {
    add(Memory::Kept, kept.of_shard(mesh_.shard()), 0);
  }
  if (context_.registered != nullptr && region.requires_grad && !on_host) {
    context_.registered->reserve(Window::Gradients, bucket(home_, index).bytes());
  }
  if (context_.collectives == nullptr) {
    return;
  }
  const int64_t across = mesh_.num_across();
  add(Memory::Scratch, mesh_.parts() > 1 ? sent : sent.of_shards(across), 0);
  if (mesh_.sums_in_order) {
    add(Memory::Sums, kept.of_shards(across * (mesh_.sums_across() ? 2 : 1)), 0);
    cut_sums(index);
  } else if (mesh_.shards_across) {
    cut_scratch(index);
  }
  if (mesh_.sums_in_order || region.has_wire()) {
    add(Memory::Wire, sent, mesh_.shard());
  }
}

// The reduction over the replicas writes its result into this rank's part, or after it.
void UnitMemory::cut_scratch(int index) {
  const Bucket& scratch = bucket(Memory::Scratch, index);
  const int64_t own = layout_.regions()[index].shard_numel;
  const int64_t numel = own * mesh_.num_across();
  const bool in_place = mesh_.replicas.parts() == 1;
  cuts_[index] = {
      scratch.view(index, 0, {numel}),
      in_place ? scratch.view(index, mesh_.replicas.rank * own, {own})
               : scratch.view(index, numel, {numel})};
}

// This rank's part comes first; the sums that the replicas send follow it.
void UnitMemory::cut_sums(int index) {
  const Region& region = layout_.regions()[index];
  const Bucket& sums = bucket(Memory::Sums, index);
  const int64_t numel = region.shard_numel * mesh_.num_across();
  cut_ = Memory::Sums;
  cuts_[index].part = sums.view(index, 0, {numel});
  if (mesh_.sums_across()) {
    cuts_[index].across = sums.view(index, numel, {region.numel() / mesh_.state.size});
  }
}

// Returns null if the region's gradients are not in the host's mapping. The mapping lacks regions
// that were frozen when the model was sharded.
const HostStates* UnitMemory::host_of(int region) const {
  const bool is_planned = layout_.regions()[region].requires_grad;
  return context_.tiers.gradients == Tier::Host && is_planned ? context_.host : nullptr;
}

// -- tensors --------------------------------------------------------------------------------

const at::Tensor& UnitMemory::whole(Memory memory, int region) const {
  return memory == Memory::Across ? cuts_[region].across : bucket(memory, region).full(region);
}

const at::Tensor& UnitMemory::own(Memory memory, int region) const {
  const Cut& cut = cuts_[region];
  if (memory == Memory::Across) {
    return cut.across;
  }
  if (memory == cut_ && cut.part.defined()) {
    return cut.part;
  }
  return bucket(memory == Memory::Kept ? home_ : memory, region).own(region);
}

at::Tensor UnitMemory::summed(Memory memory, int region, int64_t numel) const {
  const at::Tensor& kept = own(memory, region);
  if (!mesh_.sums_in_order || kept.numel() == numel) {
    return kept;
  }
  const int64_t within = layout_.regions()[region].numel() / mesh_.state.size;
  const int64_t begin = mesh_.shards_optimizer ? 0 : mesh_.state.rank * within;
  return kept.narrow(0, begin + (numel < within ? mesh_.replicas.rank * numel : 0), numel);
}

const at::Tensor& UnitMemory::bytes(Memory memory, int region) const {
  return memory == Memory::Near ? near_.at(region) : bucket(memory, region).full_bytes(region);
}

Operands UnitMemory::operands(const Step& step) const {
  const Axis& axis = mesh_.axis(step.axis);
  const bool is_across = step.axis == AxisName::Replicas;
  if (step.op == TraceOp::AllGather || step.op == TraceOp::GatherNear) {
    const Bucket& gathered = bucket(step.to, step.region);
    const at::Tensor& full = gathered.full_bytes(step.region);
    const at::Tensor to = is_across ? slice(full, mesh_.state) : full;
    if (step.from != step.to) {
      return {to, bytes(step.from, step.region)};
    }
    const at::Tensor& own = gathered.own_bytes(step.region);
    return {to, own.numel() * axis.size == to.numel() ? own : slice(to, axis)};
  }
  if (step.op == TraceOp::GatherSums) {
    const int64_t numel = layout_.regions()[step.region].numel();
    const at::Tensor to = summed(step.to, step.region, numel / (is_across ? mesh_.state.size : 1));
    return {to, slice(to, axis)};
  }
  if (is_across) {
    const at::Tensor& to = own(step.to, step.region);
    return {to, summed(step.from, step.region, to.numel())};
  }
  return {received(step.to, step.region, step.parts), whole(step.from, step.region)};
}

// -- blocks ---------------------------------------------------------------------------------

void UnitMemory::take(const Step& step) {
  if (step.to == Memory::Kept) {
    return keep_grad(step.region);
  }
  Block& block = this->block(step.to, step.region);
  TORCH_INTERNAL_ASSERT(step.nbytes >= block.bucket->nbytes());
  block.slot = context_.pool->acquire(block_of(step), step.nbytes, step.stream);
  block.bucket->attach(block.slot->data);
}

void UnitMemory::free(const Step& step) {
  Block& block = this->block(step.from, step.region);
  if (block.slot) {
    block.bucket->detach();
    context_.pool->release(*block.slot, step.stream);
    block.slot.reset();
  }
}

Operands UnitMemory::near_part(int region) {
  near_.resize(layout_.regions().size());
  const at::Tensor part = slice(full().full_bytes(region), mesh_.near);
  if (!near_[region].defined()) {
    const c10::InferenceMode normal(false); // steps outside of inference mode write to it, too
    near_[region] = at::empty_like(part);
  }
  return {near_[region], part};
}

// -- kept gradients -------------------------------------------------------------------------

at::Tensor UnitMemory::grad_view(int region, int64_t begin, at::IntArrayRef sizes) const {
  const bool is_part = home_ == Memory::FullGrad;
  const int64_t before = is_part ? layout_.regions()[region].shard_range(mesh_.shard()).begin : 0;
  return sums_view(region, before + begin, sizes);
}

void UnitMemory::keep_grad(int region) {
  Bucket& home = bucket(home_, region);
  if (home.attached()) {
    return;
  }
  if (const HostStates* host = host_of(region)) {
    home.attach(host->gradient(unit_, region));
  } else {
    const at::Tensor bytes = home.bytes();
    home.attach(context_.memory_for(bytes));
    bytes.zero_();
  }
}

std::vector<at::Tensor> UnitMemory::kept_grads() const {
  std::vector<at::Tensor> found;
  for (int region = 0; region < static_cast<int>(cuts_.size()); ++region) {
    if (keeps_grad(region)) {
      found.push_back(own(Memory::Kept, region));
    }
  }
  return found;
}

std::vector<at::Tensor> UnitMemory::grad_bytes() const {
  std::vector<at::Tensor> found;
  for (int region = 0; region < static_cast<int>(cuts_.size()); ++region) {
    if (keeps_grad(region) && host_of(region) == nullptr) {
      found.push_back(bucket(home_, region).bytes());
    }
  }
  return found;
}

} // namespace zerocore
