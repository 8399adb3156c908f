// Carries out the steps of the ring.
#include "runtime/swapped_units.h"

#include <ATen/core/functional.h>

#include <algorithm>
#include <utility>

namespace zerocore {

SwappedUnits::SwappedUnits(const SwapOptions& options)
    : ring_(
          c10::fmap(options.ranges, [](const Range& range) { return range.size(); }),
          options.num_buffers,
          kDiskAlignment),
      ranges_(options.ranges),
      tickets_(options.num_buffers),
      brought_(options.num_buffers, -1),
      file_(std::make_unique<io::DiskFile>(options.folder, options.name, options.file_nbytes)),
      memory_(std::make_shared<FileMemory>(file_->descriptor(), options.file_nbytes)) {
  for (const std::string& name : options.unit_names) {
    labels_.push_back(options.name + " of unit '" + name + "'");
  }
}

void SwappedUnits::expect(std::vector<UnitId> order) {
  run([&](SwapSteps& steps) { ring_.expect(std::move(order), steps); });
}

char* SwappedUnits::acquire(UnitId unit) {
  run([&](SwapSteps& steps) { ring_.acquire(unit, steps); });
  return memory_->data() + ranges_[unit].begin;
}

void SwappedUnits::release(UnitId unit, bool changed) {
  run([&](SwapSteps& steps) { ring_.release(unit, changed, steps); });
}

void SwappedUnits::settle(UnitId unit) {
  run([&](SwapSteps& steps) { ring_.settle(unit, steps); });
}

void SwappedUnits::finish() {
  run([&](SwapSteps& steps) { ring_.finish(steps); });
  for (int buffer = 0; buffer < ring_.num_buffers(); ++buffer) {
    put_back(buffer);
  }
}

void SwappedUnits::check() const {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
}

template <typename Plan>
void SwappedUnits::run(const Plan& plan) {
  check();
  SwapSteps steps;
  plan(steps);
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
  const Range& range = ranges_[step.unit];
  const std::string& label = labels_.at(step.unit);
  if (step.kind == SwapKind::Read) {
    bring(step.unit, step.buffer);
  }
  char* data = memory_->data() + range.begin;
  tickets_[step.buffer] = step.kind == SwapKind::Read
      ? file_->read(range.begin, data, range.size(), label)
      : file_->write(range.begin, data, range.size(), label);
}

void SwappedUnits::bring(UnitId unit, int buffer) {
  std::replace(brought_.begin(), brought_.end(), unit, -1); // an empty unit had taken its buffer
  put_back(buffer);
  memory_->bring(ranges_[unit]);
  brought_[buffer] = unit;
}

void SwappedUnits::put_back(int buffer) {
  if (brought_[buffer] >= 0) {
    memory_->put_back(ranges_[brought_[buffer]]);
    brought_[buffer] = -1;
  }
}

} // namespace zerocore
