#include "engine/unit/step_runner.h"

#include <ATen/record_function.h>

#include <utility>

#include "engine/unit/offloaded_states.h"
#include "engine/unit/unit.h"
#include "engine/unit/unit_values.h"
#include "kernels/ops.h"

namespace zerocore {

StepRunner::StepRunner(const Unit& unit, UnitMemory& memory)
    : unit_(unit),
      context_(unit.context()),
      layout_(unit.layout()),
      memory_(memory),
      reductions_(layout_.regions().size()) {}

void StepRunner::run(const Step& step) {
  switch (step.kind) {
    case StepKind::Count:
      context_.note(*step.op, unit_.id(), step.nbytes);
      return;
    case StepKind::Take:
      return memory_.take(step);
    case StepKind::Free:
      return memory_.free(step);
    case StepKind::Order:
      return context_.streams->order(step.stream, step.behind);
    case StepKind::Move:
      return move(step);
    case StepKind::Start:
      return start(step);
    case StepKind::Wait:
      return wait(step);
    case StepKind::Ready:
      return make_ready(step);
  }
}

void StepRunner::move(const Step& step) {
  switch (step.how) {
    case How::Copy:
      return load(step);
    case How::Encode:
      return encode(step);
    case How::CopyOut:
      return copy_out();
    case How::Keep:
      return keep_near();
    case How::Cast:
      return cast(step);
    case How::Sum:
      return sum(step);
    case How::Pack:
    case How::Zero:
      TORCH_INTERNAL_ASSERT(false, "the reducer must carry out this step");
  }
}

void StepRunner::make_ready(const Step& step) {
  if (step.to == Memory::Shard) {
    context_.disk->load(unit_.id());
  } else {
    memory_.full().show();
  }
}

// -- parameters -----------------------------------------------------------------------------

// Copies this rank's part from the host to the device, on the all-gather stream.
void StepRunner::load(const Step& step) {
  const bool on_disk = context_.tiers.parameters == Tier::Disk;
  const at::Tensor& to = memory_.own(step.to, step.region);
  const Streams& streams = *context_.streams;
  const auto record = context_.note(*step.op, unit_.id(), step.nbytes);
  if (record != nullptr) {
    record->begin = streams.record_timed(StreamRole::AllGather);
  }
  if (!on_disk || context_.disk->is_loaded()) {
    const auto guard = streams.use(StreamRole::AllGather);
    // The next load frees the memory of a file, so this waits for the copy.
    to.copy_(memory_.whole(step.from, step.region), /*non_blocking=*/!on_disk);
  }
  loaded_ = streams.record(StreamRole::AllGather);
  if (record != nullptr) {
    record->note_done(); // on a device, the event's time replaces it
    record->end = streams.record_timed(StreamRole::AllGather);
  }
  streams.note_write(StreamRole::AllGather, to, "loads", unit_.name());
}

// Runs on the all-gather stream, so the compute stream does not wait.
void StepRunner::encode(const Step& step) {
  const auto guard = context_.streams->use(StreamRole::AllGather);
  const at::Tensor& to = memory_.own(step.to, step.region);
  const at::Tensor& from = memory_.whole(step.from, step.region);
  context_.streams->note_read(StreamRole::AllGather, from, "encodes", unit_.name());
  context_.streams->note_write(StreamRole::AllGather, to, "encodes", unit_.name());
  const auto format = static_cast<at::ScalarType>(layout_.regions()[step.region].gather.dtype);
  kernels::encode(to, from, format);
}

// Runs on the compute stream. See Note [Shards of rows].
void StepRunner::copy_out() {
  for (const int index : memory_.full().regions()) {
    const Region& region = layout_.regions()[index];
    const at::Tensor& from = memory_.whole(Memory::Received, index);
    const at::Tensor& to = memory_.whole(Memory::Full, index);
    const std::vector<kernels::Piece> pieces = layout_.by_rows()
        ? row_pieces(layout_, index)
        : std::vector<kernels::Piece>{{0, 0, region.numel()}};
    context_.streams->note_read(StreamRole::Compute, from, "copies out", unit_.name());
    context_.streams->note_write(StreamRole::Compute, to, "copies out", unit_.name());
    if (region.is_encoded()) {
      kernels::decode(to, from, pieces, static_cast<at::ScalarType>(region.gather.dtype));
    } else {
      kernels::copy_pieces(to, from, pieces);
    }
  }
}

// Runs on the compute stream.
void StepRunner::keep_near() {
  for (const int region : memory_.full().regions()) {
    const auto [to, from] = memory_.near_part(region);
    context_.streams->note_write(StreamRole::Compute, to, "keeps for near ranks", unit_.name());
    to.copy_(from);
  }
  near_kept_ = context_.streams->record(StreamRole::Compute);
}

void StepRunner::drop_near() {
  if (memory_.has_near()) {
    // An all-gather may still read the memory.
    context_.streams->order(StreamRole::Compute, StreamRole::AllGather);
    memory_.drop_near();
  }
}

// -- gradients ------------------------------------------------------------------------------

namespace {

// Returns a power of two near the square root of the number of ranks. As in FSDP2, float16
// gradients are divided by it before the sum, so that no intermediate value overflows float16.
int64_t near_square_root(int64_t num_ranks) {
  int64_t factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) {
    factor *= 2;
  }
  return factor;
}

double packed_scale(const Region& region, const UnitMesh& mesh, double all) {
  if (static_cast<at::ScalarType>(region.reduce.dtype) == at::kHalf) {
    return 1.0 / static_cast<double>(near_square_root(mesh.world_size()));
  }
  return mesh.sums_in_order ? 1.0 : all;
}

} // namespace

double scale_of(const Step& step, const Unit& unit) {
  const double all = unit.settings().gradient_scale;
  const double packed =
      packed_scale(unit.layout().regions()[step.region], unit.context().mesh, all);
  switch (step.scale) {
    case ScalePart::None:
      return 1.0;
    case ScalePart::All:
      return all;
    case ScalePart::Packed:
      return packed;
    case ScalePart::Rest:
      return all / packed;
    case ScalePart::RestUndone:
      return packed / all;
  }
  TORCH_INTERNAL_ASSERT(false);
}

void StepRunner::cast(const Step& step) {
  const at::Tensor& from = memory_.whole(step.from, step.region);
  const at::Tensor& to = memory_.whole(step.to, step.region);
  context_.streams->note_read(StreamRole::Compute, from, "casts", unit_.name());
  context_.streams->note_write(StreamRole::Compute, to, "casts", unit_.name());
  kernels::pack(to, {{&from, 0, 0, from.numel()}}, scale_of(step, unit_));
}

void StepRunner::sum(const Step& step) {
  const at::Tensor& from = memory_.received(step.from, step.region, step.parts);
  const at::Tensor to = memory_.summed(step.to, step.region, from.numel() / step.parts);
  context_.streams->note_read(StreamRole::Compute, from, "sums", unit_.name());
  context_.streams->note_write(StreamRole::Compute, to, "sums", unit_.name());
  kernels::accumulate(to, from, step.parts, step.adds, scale_of(step, unit_));
}

// -- collectives ----------------------------------------------------------------------------

void StepRunner::start(const Step& step) {
  Collectives& by = context_.collectives_of(step.axis);
  if (together_by_ != &by) {
    launch();
  }
  if (step.from == Memory::Near) {
    context_.streams->wait(StreamRole::AllGather, near_kept_);
  } else if (!is_gather(step)) {
    context_.streams->order(by.reducing(), StreamRole::ReduceScatter);
  }
  const bool sums_in_order = !is_gather(step) && context_.mesh.sums_in_order;
  const bool is_waited_for = // before the next collective starts
      sums_in_order && (step.axis == AxisName::Replicas || step.op == TraceOp::GatherSums);
  auto [to, from] = memory_.operands(step);
  CollectiveCall call = {std::move(to), std::move(from), unit_.tag(*step.op, step.nbytes)};
  const UnitSettings& settings = unit_.settings();
  const OwnCollective& own = is_gather(step) ? settings.gather : settings.reduce;
  if (own && step.axis == AxisName::State) {
    call.tag.own = &own;
  }
  const bool joins = layout_.regions().size() > 1 && by.launches_together() && !is_waited_for &&
      call.tag.own == nullptr;
  const TraceOp op = is_gather(step) ? TraceOp::AllGather : *step.op;
  if (joins) {
    together_by_ = &by;
    together_op_ = op;
    together_.push_back({std::move(call), &pending_of(step)});
  } else {
    pending_of(step).push_back(by.start(op, call));
  }
}

void StepRunner::launch() {
  if (together_.empty()) {
    return;
  }
  std::vector<Joint> joint = std::exchange(together_, {});
  std::vector<CollectiveCall> calls;
  for (Joint& each : joint) {
    calls.push_back(std::move(each.call));
  }
  auto started = together_by_->start_together(together_op_, calls);
  for (size_t i = 0; i < started.size(); ++i) {
    joint[i].pending->push_back(std::move(started[i]));
  }
}

void StepRunner::wait(const Step& step) {
  const char* what = is_gather(step) ? "zerocore::wait_all_gather (" : "zerocore::wait_reduce (";
  RECORD_USER_SCOPE(what + unit_.name() + ")"); // evaluated only under a profiler
  wait_for_all(pending_of(step), *context_.streams);
}

} // namespace zerocore
