// Compares what the ranks have written to unsharded parameters in place.
#include "engine/write_check.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/math.h"
#include "io/crc32.h"

namespace zerocore {

namespace {

constexpr int64_t kChunk = int64_t{1} << 22; // bytes; on a device each needs 16 times its memory

// Depends on the place of each byte; not negative.
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

} // namespace

WriteCheck::WriteCheck(const Units& units, const UnitContext& context)
    : units_(units), context_(context) {
  for (const auto& unit : units) {
    first_.push_back(sums_.size());
    sums_.resize(sums_.size() + unit->params().size());
  }
}

// Of other units ranks hold other parts or other experts; where nothing is sharded each rank keeps
// all that it has written.
bool WriteCheck::is_shared(const Unit& unit) const {
  const UnitMesh& mesh = unit.context().mesh;
  return context_.control != nullptr && (mesh.shards_optimizer || mesh.shards_parameters) &&
      mesh.world_size() == context_.control->size();
}

void WriteCheck::add(UnitId id) {
  const Unit& unit = *units_[id];
  if (!is_shared(unit)) {
    return;
  }
  const std::vector<at::Tensor> values = unit.written_values();
  for (size_t param = 0; param < values.size(); ++param) {
    if (values[param].defined()) {
      int64_t& sum = sums_[first_[id] + param];
      sum = static_cast<int64_t>(mix(sum, checksum(values[param])) >> 2) + 1;
    }
  }
}

void WriteCheck::add_later(UnitId unit) {
  if (std::ranges::find(later_, unit) == later_.end()) {
    later_.push_back(unit);
  }
}

void WriteCheck::add_rest() {
  for (const UnitId unit : std::exchange(later_, {})) {
    add(unit);
  }
}

int64_t WriteCheck::sum() const {
  uint64_t sum = 0;
  for (const int64_t each : sums_) {
    sum = each == 0 && sum == 0 ? 0 : mix(sum, static_cast<uint64_t>(each));
  }
  return static_cast<int64_t>(sum >> 2);
}

void WriteCheck::forget() {
  std::ranges::fill(sums_, 0);
  later_.clear();
}

void WriteCheck::fail() const {
  const std::vector<bool> differ = context_.control->differing(sums_);
  const std::string* first = nullptr;
  for (const auto& unit : units_) {
    for (size_t param = 0; param < unit->params().size(); ++param) {
      if (differ[first_[unit->id()] + param]) {
        first = first == nullptr ? &unit->params()[param].spec.fqn : first;
        unit->versions().mark_written(param); // on each rank: all gather it again
      }
    }
  }
  TORCH_INTERNAL_ASSERT(first != nullptr, "sums differ, and those of no parameter");
  TORCH_CHECK_VALUE(
      false,
      "parameter '",
      *first,
      "' was changed in place, by a forward, a hook or a backward, to values that differ between "
      "the ranks; each rank keeps one part of them, so they must be the same. Average what the "
      "change is computed from (dist.all_reduce), or send one rank's (dist.broadcast(values, 0)), "
      "before it is written.");
}

} // namespace zerocore
