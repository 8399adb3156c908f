// Begins the first gather of a forward at an optimizer's step.
#include "engine/first_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

// Index of the first 8 bytes that differ, or -1.
at::Tensor first_difference(const at::Tensor& bytes, const at::Tensor& others) {
  if (bytes.is_cpu() && bytes.equal(others)) {
    return at::full({}, -1, at::kLong);
  }
  const at::Tensor differs = bytes.view(at::kLong).ne(others.view(at::kLong));
  return at::where(differs.any(), at::argmax(differs.to(at::kByte)), -1);
}

// Of which 8 bytes of a region of this rank's shard are.
const UnitParam& param_at(const Unit& unit, int index, int64_t word) {
  const Layout& layout = unit.layout();
  const Region& region = layout.regions()[index];
  const int64_t shard = unit.context().shard;
  const int64_t element = word * static_cast<int64_t>(sizeof(int64_t)) / region.itemsize;
  int found = region.params.front();
  for (const int param : region.params) { // in the order of their places
    if (!layout.owned(param, shard).empty() && layout.offset_in_shard(param, shard) <= element) {
      found = param;
    }
  }
  return unit.params()[found];
}

} // namespace

void FirstGather::begin_update(const std::vector<UnitId>& units) {
  if (!is_on()) {
    return;
  }
  ++num_steps_;
  if (std::find(units.begin(), units.end(), pending_) != units.end()) {
    drop();
  }
}

void FirstGather::begin() {
  const at::NoGradGuard no_grad;
  const UnitId id = parts_.schedule.order().front().unit;
  Unit& unit = *parts_.units[id];
  if (parts_.schedule.is_resident(id)) {
    return;
  }
  casts_ = !unit.is_cast();
  in_use_.refresh(id);
  in_use_.order_gathers();
  unit.gathers().copy_next();
  pending_ = id;
  try {
    parts_.schedule.residency().gather_ahead(id, parts_.actions);
    in_use_.run(parts_.actions);
  } catch (...) {
    give_back();
    in_use_.settle();
    throw;
  }
}

void FirstGather::drop() {
  if (pending_ >= 0) {
    give_back();
    in_use_.run(parts_.actions);
  }
}

void FirstGather::give_back() {
  parts_.schedule.residency().drop_ahead(std::exchange(pending_, -1), parts_.actions);
}

void FirstGather::begin_pass() {
  if (num_steps_ > 0) {
    expected_steps_ = std::exchange(num_steps_, 0);
  }
  if (pending_ >= 0) {
    in_use_.check_homes(pending_);
  }
  used_ = std::exchange(pending_, -1);
  changed_.reset();
  if (used_ < 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  Unit& unit = *parts_.units[used_];
  // The comparison is of weights as layers compute with them, those that a gather would send now.
  if (casts_ || !unit.is_cast()) {
    unit.wait_for_unshard(); // it sends what this writes
    unit.main().cast();
    unit.mark_cast();
  }
  unit.mark_fresh();
  if (unit.state() == UnitState::Unsharded) { // somebody has waited for it already
    compare();
  } else {
    unit.gathers().then([this] { compare(); });
  }
}

// On the compute stream.
void FirstGather::compare() {
  const Unit& unit = *parts_.units[used_];
  const Streams& streams = parts_.streams;
  std::vector<at::Tensor> found;
  for (const int region : unit.layout().all_regions()) {
    const at::Tensor& held = unit.shard_bytes(region);
    const at::Tensor& sent = unit.sent_bytes(region);
    streams.note_read(StreamRole::Compute, held, "is compared", unit.name());
    streams.note_read(StreamRole::Compute, sent, "is compared", unit.name());
    found.push_back(first_difference(held.to(sent.device(), /*non_blocking=*/true), sent));
  }
  const auto options = at::TensorOptions(at::kLong).pinned_memory(streams.device().is_cuda());
  changed_ = at::full({static_cast<int64_t>(found.size())}, -1, options);
  changed_.copy_(at::stack(found), /*non_blocking=*/true);
  if (!streams.device().is_cpu()) {
    compared_ = streams.record(StreamRole::Compute);
  }
}

void FirstGather::check() {
  if (used_ < 0) {
    return;
  }
  Unit& unit = *parts_.units[used_];
  unit.wait_for_unshard(); // this rank may have skipped it
  used_ = -1;
  if (const StreamEvent compared = std::exchange(compared_, nullptr); compared != nullptr) {
    Streams::synchronize(compared);
  }
  const at::Tensor changed = std::exchange(changed_, at::Tensor());
  const auto* first = changed.const_data_ptr<int64_t>();
  const auto* end = first + changed.numel();
  const auto* found = std::find_if(first, end, [](int64_t word) { return word >= 0; });
  TORCH_CHECK_VALUE(
      found == end,
      "parameter '",
      found == end ? "" : param_at(unit, static_cast<int>(found - first), *found).spec.fqn,
      "' of unit '",
      unit.name(),
      "' was changed on this rank between optimizer.step() and the forward: gather_at_step=True "
      "had sent it to the other ranks by then, so they have computed with another value. Change "
      "weights before optimizer.step() or inside of `with zerocore.unsharded(model, "
      "write_back=True):`, or shard with gather_at_step=False. The weights are as they were set; "
      "the next forward gathers them again.");
}

} // namespace zerocore
