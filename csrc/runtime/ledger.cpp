// The ring of a rank's last collectives.
#include "runtime/ledger.h"

#include <algorithm>

namespace zerocore {

int64_t Ledger::begin(const char* op, const std::string& unit, int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  slots_[next_ % kKept] = {op, &unit, nbytes, false};
  return next_++;
}

void Ledger::begin_wait(int64_t number) {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  waiting_ = number;
  waiting_since_ = now;
}

void Ledger::end_wait() {
  const std::lock_guard lock(mutex_);
  waiting_ = -1;
}

void Ledger::finish(int64_t number) {
  const std::lock_guard lock(mutex_);
  waiting_ = -1;
  if (number >= next_ - static_cast<int64_t>(kKept)) {
    slots_[number % kKept].done = true;
  }
}

void Ledger::set_trainable(size_t first, const std::vector<bool>& flags) {
  const std::lock_guard lock(mutex_);
  trainable_.resize(std::max(trainable_.size(), first + flags.size()), '0');
  for (size_t i = 0; i < flags.size(); ++i) {
    trainable_[first + i] = flags[i] ? '1' : '0';
  }
}

LedgerState Ledger::state(size_t count) const {
  const std::lock_guard lock(mutex_);
  LedgerState state;
  state.waiting = waiting_;
  state.waiting_since = waiting_since_;
  state.trainable = trainable_;
  const auto kept = static_cast<int64_t>(std::min(count, kKept));
  for (int64_t number = std::max(oldest_, next_ - kept); number < next_; ++number) {
    const Slot& slot = slots_[number % kKept];
    state.entries.push_back({number, slot.op, *slot.unit, slot.nbytes, slot.done});
  }
  return state;
}

bool Ledger::is_stalled(std::chrono::steady_clock::duration limit) const {
  const std::lock_guard lock(mutex_);
  return waiting_ >= 0 && std::chrono::steady_clock::now() - waiting_since_ > limit;
}

void Ledger::forget() {
  const std::lock_guard lock(mutex_);
  oldest_ = next_;
  waiting_ = -1;
}

} // namespace zerocore
