// Collects trace records.
#include "runtime/trace.h"

namespace zerocore {

std::shared_ptr<TraceRecord> Trace::add(
    TraceOp op,
    UnitId unit,
    int64_t nbytes,
    int64_t pool_nbytes) {
  if (!enabled_) {
    return nullptr;
  }
  auto record = std::make_shared<TraceRecord>();
  *record = {op, unit, nbytes, pool_nbytes, now_ns()};
  records_.push_back(record);
  return record;
}

std::vector<TraceRecord> Trace::stop() {
  enabled_ = false;
  std::vector<TraceRecord> records;
  records.reserve(records_.size());
  for (const auto& record : records_) {
    records.push_back(*record);
  }
  records_.clear();
  return records;
}

} // namespace zerocore
