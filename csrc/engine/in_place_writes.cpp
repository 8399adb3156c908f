#include "engine/in_place_writes.h"

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "common/math.h"
#include "engine/graph/autograd.h"
#include "io/crc32.h"

namespace zerocore {

namespace {

constexpr int64_t kChunk = int64_t{1} << 22; // bytes; on a device, a chunk needs 16 times its size

// Returns a checksum of all bytes and their positions, which is not negative.
int64_t checksum(const at::Tensor& values) {
  const at::Tensor bytes = values.view(at::kByte);
  if (bytes.is_cpu()) {
    return io::crc32(0, bytes.const_data_ptr(), static_cast<size_t>(bytes.numel()));
  }
  uint64_t sum = 0;
  for (const at::Tensor& chunk : bytes.split(kChunk)) {
    const at::Tensor places = at::arange(1, chunk.numel() + 1, chunk.options().dtype(at::kLong));
    sum = mix(sum, static_cast<uint64_t>((chunk.to(at::kLong) * places).sum().item<int64_t>()));
  }
  return static_cast<int64_t>(sum >> 2);
}

// Returns the norm on a logarithmic scale in steps of 0.1 %, because ranks may round differently.
int64_t magnitude(const at::Tensor& values) {
  const double norm = values.norm().item<double>();
  return std::isfinite(norm) && norm > 0.0 ? std::lround(1000.0 * std::log(norm)) : 0;
}

// Mixes `number` into `sum`, which becomes positive.
void mix_in(int64_t& sum, int64_t number) {
  sum = static_cast<int64_t>(mix(sum, number) >> 2) + 1;
}

} // namespace

InPlaceWrites::InPlaceWrites(
    const Units& units,
    const UnitContext& context,
    const Schedule& schedule)
    : units_(units), context_(context), schedule_(schedule) {
  for (const auto& unit : units) {
    first_.push_back(sums_.size());
    sums_.resize(sums_.size() + unit->params().size());
  }
}

// User code such as `with torch.no_grad(): self.weight.clamp_()` writes to the gathered parameters.
// Copies this rank's part to the shard, unless the shard is a part of the full parameters.
void InPlaceWrites::save(UnitId id) {
  Unit& unit = *units_[id];
  const at::NoGradGuard no_grad;
  if (!unit.take_writes()) {
    return;
  }
  const UnitMesh& mesh = unit.context().mesh;
  TORCH_CHECK_VALUE(
      !mesh.gathers_near(),
      "unit '",
      unit.name(),
      "': its parameters were changed in place while they were gathered, which is not possible "
      "with "
      "zerocore.Communication(regather=...) or, at stage 3, with "
      "zerocore.Communication(replicas_share='optimizer'): near ranks keep parts of the "
      "gathered values. Shard the model without this option.");
  unit.mark_written();
  const bool are_others_there = context_.control != nullptr && schedule_.in_root_forward();
  if (mesh.shards_parameters && are_others_there && schedule_.follows_order()) {
    unit.save_write();
  }
  if (!are_others_there) {
    add(id);
  } else if (std::ranges::find(later_, id) == later_.end()) {
    later_.push_back(id);
  }
  if (!unit.has_saved_write() && (mesh.shards_parameters || !unit.main().empty())) {
    unit.write_back(/*all=*/false);
  }
}

void InPlaceWrites::finish() {
  for (const auto& unit : units_) {
    if (unit->has_saved_write()) {
      unit->finish_write();
    }
  }
}

void InPlaceWrites::drop() {
  for (const auto& unit : units_) {
    unit->drop_writes();
  }
}

// -- checksums -------------------------------------------------------------------------------

// Returns whether all ranks must write the same values to the unit. At stage 0 each rank keeps its
// own values.
bool InPlaceWrites::is_shared(const Unit& unit) const {
  const UnitMesh& mesh = unit.context().mesh;
  return context_.control != nullptr && mesh.communicates() &&
      (mesh.shards_optimizer || mesh.shards_parameters);
}

// Returns a number for the group of ranks that share the unit: 0 for all ranks of the model.
int64_t InPlaceWrites::sharers_of(const Unit& unit) const {
  const UnitContext& context = unit.context();
  return context.mesh.world_size() == context_.control->size() ? 0 : 1 + context.first_rank;
}

void InPlaceWrites::add(UnitId id) {
  const Unit& unit = *units_[id];
  if (!is_shared(unit)) {
    return;
  }
  const std::vector<at::Tensor> values = unit.written_values();
  for (size_t param = 0; param < values.size(); ++param) {
    if (values[param].defined()) {
      mix_in(sums_[first_[id] + param], checksum(values[param]));
      urgent_ = true;
    }
  }
}

void InPlaceWrites::add_rest() {
  for (const UnitId unit : std::exchange(later_, {})) {
    add(unit);
  }
}

// With a static graph the user promises that all ranks do the same, so no writes are compared.
bool InPlaceWrites::takes_notes() const {
  const UnitMesh& mesh = context_.mesh;
  return !updating_ && context_.control != nullptr && !context_.control->is_static() &&
      (mesh.shards_optimizer || mesh.shards_parameters);
}

void InPlaceWrites::note(UnitId id, size_t param, int64_t number) {
  const Unit& unit = *units_.at(id);
  if (takes_notes() && is_shared(unit) && param < unit.params().size()) {
    mix_in(sums_[first_[id] + param], number);
  }
}

void InPlaceWrites::note_gradients(UnitId id, const GradViews& views) {
  const Unit& unit = *units_.at(id);
  if (context_.control == nullptr || !unit.context().mesh.communicates()) {
    return;
  }
  for (size_t i = 0; i < unit.params().size(); ++i) {
    const at::Tensor& grad = gradient_of(unit.params()[i].full);
    if (views.is_set(id, static_cast<int>(i)) && grad.layout() == at::kStrided) {
      mix_in(sums_[first_[id] + i], magnitude(grad));
    }
  }
}

int64_t InPlaceWrites::sum() const {
  uint64_t sum = 0;
  bool is_apart = false;
  for (const auto& unit : units_) {
    for (size_t param = 0; param < unit->params().size(); ++param) {
      const int64_t each = sums_[first_[unit->id()] + param];
      is_apart = is_apart || (each != 0 && sharers_of(*unit) != 0);
      sum = each == 0 && sum == 0 ? 0 : mix(sum, static_cast<uint64_t>(each));
    }
  }
  sum = is_apart ? mix(sum, static_cast<uint64_t>(context_.control->rank()) + 1) : sum;
  return static_cast<int64_t>(sum >> 2);
}

void InPlaceWrites::forget() {
  std::ranges::fill(sums_, 0);
  later_.clear();
  urgent_ = updating_ = false; // an exception may have ended an optimizer's step
}

const std::string* InPlaceWrites::find_differing() const {
  std::vector<int64_t> sharers;
  for (const auto& unit : units_) {
    sharers.insert(sharers.end(), unit->params().size(), sharers_of(*unit));
  }
  const std::vector<bool> differ = context_.control->differing(sharers, sums_);
  const std::string* first = nullptr;
  for (const auto& unit : units_) {
    for (size_t param = 0; param < unit->params().size(); ++param) {
      if (differ[first_[unit->id()] + param]) {
        first = first == nullptr ? &unit->params()[param].spec.fqn : first;
        unit->versions().mark_written(param); // so that every rank gathers it again
      }
    }
  }
  return first;
}

void InPlaceWrites::fail(const std::string& fqn) {
  TORCH_CHECK_VALUE(
      false,
      "parameter '",
      fqn,
      "' was changed in place, by a forward, a hook, a backward or between steps, or its .grad was "
      "set (torch.autograd.grad does not average), to values that differ between the ranks; they "
      "must be the same. "
      "Before the write, average the values (dist.all_reduce) or send those of one rank "
      "(dist.broadcast(values, 0)).");
}

} // namespace zerocore
