// Units that are read, and units that give way.
#include "plan/swap_ring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/math.h"

namespace zerocore {

SwapRing::SwapRing(const std::vector<int64_t>& unit_nbytes, int num_buffers, int64_t alignment)
    : buffers_(static_cast<size_t>(std::max(num_buffers, 0))) {
  TORCH_CHECK_VALUE(num_buffers >= 1, "num_buffers must be at least 1, got ", num_buffers);
  int64_t begin = 0;
  for (const int64_t nbytes : unit_nbytes) {
    TORCH_CHECK_VALUE(nbytes >= 0, "a unit has 0 bytes or more, got ", nbytes);
    const int64_t end = begin + round_up(nbytes, alignment);
    ranges_.push_back({begin, end});
    begin = end;
  }
}

int64_t SwapRing::file_nbytes() const {
  return ranges_.empty() ? 0 : ranges_.back().end;
}

int64_t SwapRing::buffer_nbytes() const {
  int64_t nbytes = 0;
  for (const Range& range : ranges_) {
    nbytes = std::max(nbytes, range.size());
  }
  return nbytes;
}

void SwapRing::expect(std::vector<UnitId> order, SwapSteps& steps) {
  order_ = std::move(order);
  next_ = 0;
  read_ahead(steps);
}

int SwapRing::acquire(UnitId unit, SwapSteps& steps) {
  auto index = buffer_of(unit);
  if (!index.has_value()) {
    index = find_room(std::nullopt);
    TORCH_CHECK(index.has_value(), "unit ", unit, ": all ", num_buffers(), " buffers are held");
    replace(*index, unit, steps);
  }
  Buffer& buffer = buffers_[*index];
  TORCH_CHECK_VALUE(!buffer.held, "unit ", unit, " is held already");
  if (buffer.transfer == Transfer::Reads) {
    await(*index, steps);
  }
  buffer.held = true;
  const size_t use = next_use(unit);
  const bool is_in_turn = use < std::min(order_.size(), next_ + buffers_.size()); // others skipped
  next_ = is_in_turn ? use + 1 : next_;
  return *index;
}

void SwapRing::release(UnitId unit, bool changed, SwapSteps& steps) {
  const auto index = buffer_of(unit);
  TORCH_CHECK_VALUE(index.has_value() && buffers_[*index].held, "unit ", unit, " is not held");
  Buffer& buffer = buffers_[*index];
  buffer.held = false;
  buffer.released = num_releases_++;
  if (changed) {
    await(*index, steps); // an earlier write of it
    move(SwapKind::Write, *index, steps);
  }
  read_ahead(steps);
}

void SwapRing::settle(UnitId unit, SwapSteps& steps) {
  if (const auto index = buffer_of(unit)) {
    await(*index, steps);
  }
}

void SwapRing::finish(SwapSteps& steps) {
  for (int index = 0; index < num_buffers(); ++index) {
    await(index, steps);
    buffers_[index] = {};
  }
}

std::optional<int> SwapRing::buffer_of(UnitId unit) const {
  const auto found = std::ranges::find(buffers_, unit, &Buffer::unit);
  return found == buffers_.end() ? std::nullopt
                                 : std::optional(static_cast<int>(found - buffers_.begin()));
}

// Its place in the order; the order's end for none, and for no unit.
size_t SwapRing::next_use(UnitId unit) const {
  return static_cast<size_t>(
      std::find(order_.begin() + static_cast<int64_t>(next_), order_.end(), unit) - order_.begin());
}

// The buffer that gives way best; none if all are held. For what is read `ahead`, for that use,
// none gives way that is used before, or whose write has only just begun.
std::optional<int> SwapRing::find_room(std::optional<size_t> ahead) const {
  std::optional<int> best;
  for (int index = 0; index < num_buffers(); ++index) {
    const Buffer& buffer = buffers_[index];
    const bool begun = buffer.transfer == Transfer::Writes && buffer.released == num_releases_ - 1;
    const bool fits = !ahead.has_value() || (!begun && next_use(buffer.unit) > *ahead);
    if (!buffer.held && fits && (!best.has_value() || gives_way_before(buffer, buffers_[*best]))) {
      best = index;
    }
  }
  return best;
}

bool SwapRing::gives_way_before(const Buffer& one, const Buffer& other) const {
  const auto key = [&](const Buffer& buffer) {
    return std::tuple(next_use(buffer.unit), buffer.transfer == Transfer::None, -buffer.released);
  };
  return key(one) > key(other);
}

void SwapRing::move(SwapKind kind, int index, SwapSteps& steps) {
  Buffer& buffer = buffers_[index];
  if (!range(buffer.unit).empty()) {
    steps.push_back({kind, buffer.unit, index});
    buffer.transfer = kind == SwapKind::Read ? Transfer::Reads : Transfer::Writes;
  }
}

void SwapRing::await(int index, SwapSteps& steps) {
  Buffer& buffer = buffers_[index];
  if (std::exchange(buffer.transfer, Transfer::None) != Transfer::None) {
    steps.push_back({SwapKind::Await, buffer.unit, index});
  }
}

void SwapRing::replace(int index, UnitId unit, SwapSteps& steps) {
  await(index, steps);
  buffers_[index].unit = unit;
  move(SwapKind::Read, index, steps);
}

// The next units of the order, as long as there is a buffer whose unit is used later than they.
// A unit that is read earlier than it must be takes the buffer of one that may be used before it.
void SwapRing::read_ahead(SwapSteps& steps) {
  constexpr size_t kNumAhead = 2;
  for (size_t use = next_; use < std::min(order_.size(), next_ + kNumAhead); ++use) {
    if (buffer_of(order_[use]).has_value()) {
      continue;
    }
    const auto index = find_room(use);
    if (!index.has_value()) {
      return;
    }
    replace(*index, order_[use], steps);
  }
}

} // namespace zerocore
