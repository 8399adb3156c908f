// Reads parameters from a file for gathers.
#include "engine/unit/disk_loads.h"

#include <ATen/ops/from_blob.h>

namespace zerocore {

void DiskLoads::forget() {
  for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
    wait(buffer);
    buffers_[buffer] = {};
  }
  before_ = last_ = -1;
}

void DiskLoads::load(UnitId unit) {
  const size_t other = 1 - current_;
  if (!has(current_, unit)) {
    if (!has(other, unit)) {
      begin(other, unit);
    }
    current_ = other;
  }
  wait(current_);
  follows_[{before_, last_}] = unit;
  before_ = std::exchange(last_, unit);
  if (const auto next = follows_.find({before_, last_}); next != follows_.end()) {
    read_ahead(next->second);
  }
}

at::Tensor DiskLoads::loaded(const at::Tensor& bytes) const {
  const char* place = static_cast<const char*>(bytes.const_data_ptr());
  const int64_t begin = ranges_[last_].begin;
  const int64_t offset = place - (units_.memory()->data() + begin);
  return at::from_blob(memory_of(current_) + offset, bytes.sizes(), bytes.options());
}

bool DiskLoads::has(size_t buffer, UnitId unit) const {
  const Buffer& held = buffers_[buffer];
  return held.unit == unit && held.version.has_value() && held.version == version_of_(unit);
}

void DiskLoads::read_ahead(UnitId unit) {
  if (!has(current_, unit) && !has(1 - current_, unit) && version_of_(unit).has_value()) {
    begin(1 - current_, unit);
  }
}

void DiskLoads::begin(size_t buffer, UnitId unit) {
  wait(buffer); // for a read that nobody has asked for
  const Range& range = ranges_[unit];
  buffers_[buffer] = {unit, version_of_(unit), std::nullopt};
  if (range.empty()) {
    return;
  }
  try {
    const std::string label = "the parameters, " + units_.label(unit);
    buffers_[buffer].ticket =
        units_.file().read(range.begin, memory_of(buffer), range.size(), label);
  } catch (...) {
    buffers_[buffer] = {};
    failure_ = std::current_exception();
  }
}

void DiskLoads::wait(size_t buffer) {
  Buffer& held = buffers_[buffer];
  if (held.ticket) {
    try {
      units_.file().wait(*std::exchange(held.ticket, std::nullopt));
    } catch (...) {
      held = {};
      failure_ = std::current_exception();
    }
  }
}

} // namespace zerocore
