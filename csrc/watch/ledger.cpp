// The ring of a rank's last collectives.
#include "watch/ledger.h"

#include <algorithm>

namespace zerocore {

int64_t Ledger::begin(const char* op, const std::string& unit, int64_t nbytes) {
  const int64_t number = next_.load(std::memory_order_relaxed);
  Slot& slot = slots_[number % kKept];
  slot.op.store(op, std::memory_order_relaxed);
  slot.unit.store(&unit, std::memory_order_relaxed);
  slot.nbytes.store(nbytes, std::memory_order_relaxed);
  slot.done.store(false, std::memory_order_relaxed);
  next_.store(number + 1, std::memory_order_release);
  return number;
}

void Ledger::begin_wait(int64_t number) {
  waiting_.store(number, std::memory_order_relaxed);
}

void Ledger::end_wait() {
  waiting_.store(-1, std::memory_order_relaxed);
}

void Ledger::finish(int64_t number) {
  end_wait();
  if (number >= next_.load(std::memory_order_relaxed) - static_cast<int64_t>(kKept)) {
    slots_[number % kKept].done.store(true, std::memory_order_relaxed);
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
  state.waiting = waiting_.load(std::memory_order_relaxed);
  state.trainable = trainable_;
  const int64_t next = next_.load(std::memory_order_acquire);
  const auto kept = static_cast<int64_t>(std::min(count, kKept));
  for (int64_t number = std::max(oldest_, next - kept); number < next; ++number) {
    const Slot& slot = slots_[number % kKept];
    state.entries.push_back(
        {number, slot.op.load(), *slot.unit.load(), slot.nbytes.load(), slot.done.load()});
  }
  return state;
}

Silence Ledger::silence() {
  const auto now = std::chrono::steady_clock::now();
  const int64_t waiting = waiting_.load(std::memory_order_relaxed);
  if (waiting != seen_) {
    seen_ = waiting;
    seen_since_ = now;
  }
  return waiting < 0 ? Silence() : Silence{now - seen_since_, waiting};
}

void Ledger::forget() {
  const std::lock_guard lock(mutex_);
  oldest_ = next_.load(std::memory_order_relaxed);
  end_wait();
}

} // namespace zerocore
