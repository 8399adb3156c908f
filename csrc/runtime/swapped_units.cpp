// Carries out the steps of the ring.
#include "runtime/swapped_units.h"

#include <utility>

namespace zerocore {

SwappedUnits::SwappedUnits(const SwapOptions& options)
    : ring_(options.unit_nbytes, options.num_buffers, io::kDiskAlignment),
      memory_(HostMemory::map(ring_.buffer_nbytes() * ring_.num_buffers(), false)),
      tickets_(options.num_buffers),
      file_(
          std::make_unique<io::DiskFile>(
              options.folder,
              options.name,
              ring_.file_nbytes(),
              options.way)) {
  for (const std::string& name : options.unit_names) {
    labels_.push_back(options.name + " of unit '" + name + "'");
  }
}

void SwappedUnits::expect(std::vector<UnitId> order) {
  check();
  SwapSteps steps;
  ring_.expect(std::move(order), steps);
  run(steps);
}

char* SwappedUnits::acquire(UnitId unit) {
  check();
  SwapSteps steps;
  const int buffer = ring_.acquire(unit, steps);
  run(steps);
  return memory_->data() + buffer * ring_.buffer_nbytes();
}

void SwappedUnits::release(UnitId unit, bool changed) {
  check();
  SwapSteps steps;
  ring_.release(unit, changed, steps);
  run(steps);
}

void SwappedUnits::finish() {
  check();
  SwapSteps steps;
  ring_.finish(steps);
  run(steps);
}

void SwappedUnits::check() const {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
}

void SwappedUnits::run(const SwapSteps& steps) {
  try {
    for (const SwapStep& step : steps) {
      if (step.kind == SwapKind::Await) {
        file_->wait(tickets_[step.buffer]);
      } else {
        begin(step);
      }
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void SwappedUnits::begin(const SwapStep& step) {
  const Range& range = ring_.range(step.unit);
  char* data = memory_->data() + step.buffer * ring_.buffer_nbytes();
  const std::string& label = labels_.at(step.unit);
  tickets_[step.buffer] = step.kind == SwapKind::Read
      ? file_->read(range.begin, data, range.size(), label)
      : file_->write(range.begin, data, range.size(), label);
}

} // namespace zerocore
