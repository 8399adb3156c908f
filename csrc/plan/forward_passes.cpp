#include "plan/forward_passes.h"

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

// More passes than one backward goes through. The limit keeps forwards whose graphs are never used
// from piling up.
constexpr size_t kMaxPasses = 4096;

} // namespace

ForwardPass& ForwardPasses::open(bool grad) {
  if (std::exchange(outdated_, false)) {
    std::erase_if(passes_, [&](const ForwardPass& pass) { return is_outdated(pass); });
  }
  if (passes_.size() >= kMaxPasses) {
    passes_.pop_front();
  }
  ForwardPass& pass = passes_.emplace_back();
  pass.id = next_++;
  pass.grad = grad;
  return pass;
}

// Searches from the end, because most callers ask for recent passes.
const ForwardPass* ForwardPasses::find(int64_t id) const {
  const auto found = std::find_if(
      passes_.rbegin(), passes_.rend(), [&](const ForwardPass& pass) { return pass.id == id; });
  return found == passes_.rend() ? nullptr : &*found;
}

ForwardPass* ForwardPasses::find(int64_t id) {
  return const_cast<ForwardPass*>(std::as_const(*this).find(id));
}

bool ForwardPasses::reads(const CallHandle& call) const {
  const ForwardPass* pass = find(call.pass);
  return pass == nullptr ||
      std::none_of(pass->events.begin(), pass->events.end(), [&](const Instruction& event) {
           return event.kind == InstructionKind::Exit && event.call == call.call && !event.reads;
         });
}

void ForwardPasses::drop(int64_t id) {
  std::erase_if(passes_, [&](const ForwardPass& pass) { return pass.id == id; });
}

void ForwardPasses::forget_backwards() {
  for (ForwardPass& pass : passes_) {
    pass.backward = {};
  }
}

void ForwardPasses::note_change(UnitId unit) {
  units_[unit].changed_at = next_;
  outdated_ = true;
}

std::vector<bool> ForwardPasses::awaited_before(int64_t id) const {
  std::vector<bool> awaited(units_.size(), false);
  for (const ForwardPass& pass : passes_) {
    if (pass.id < id && !pass.consumed && !is_outdated(pass)) {
      for (const Instruction& event : pass.events) {
        awaited[event.unit] = awaited[event.unit] ||
            (event.kind == InstructionKind::Exit && event.needs_backward && !event.alone);
      }
    }
  }
  return awaited;
}

// Returns whether no backward can go through the pass, because all units that it would train have
// changed. False for an unfinished pass, which has no events yet.
bool ForwardPasses::is_outdated(const ForwardPass& pass) const {
  return !pass.events.empty() &&
      std::all_of(pass.events.begin(), pass.events.end(), [&](const Instruction& event) {
        const TrainedUnit& unit = units_[event.unit];
        return event.kind == InstructionKind::Enter || !event.needs_backward || !unit.reducible ||
            unit.changed_at > pass.id;
      });
}

} // namespace zerocore
