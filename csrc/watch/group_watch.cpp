// The alarm of the models of the same ranks, see Note [Alarm].
#include "watch/group_watch.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "plan/dissemination.h"
#include "watch/watchdog.h"

namespace zerocore {

namespace {

using Milliseconds = std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kFirstQuestion(5); // of silence, or a quarter of the limit
constexpr Seconds kPatience(7); // of the watchdog with the store
constexpr Seconds kWatchdog(12); // of a thread that has failed with the watchdog
constexpr size_t kKeptNames = 16;
constexpr double kDefaultSeconds = 1800; // of a group that has no timeout
// Tags of messages that are never sent.
constexpr int kUnusedTag = 0x5afe0000;
constexpr int kContexts = 8; // more than gloo has network devices

// The shortest of its backends'.
double timeout_of(c10d::ProcessGroup& group) {
  double seconds = kDefaultSeconds;
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const auto options = group.getBackend(device.type())->getBackendOptions();
      seconds = std::min(seconds, Seconds(options->timeout).count());
    } catch (const std::exception&) {
      // it has none
    }
  }
  return seconds;
}

// One receive that has waited for too long closes all connections of gloo. One whose peer is gone
// does not.
void close_gloo(c10d::Backend& backend, const std::vector<int64_t>& peers) {
  for (int context = 0; context < kContexts; ++context) {
    for (const int64_t peer : peers) {
      try {
        std::vector<at::Tensor> nothing = {at::zeros({1}, at::kByte)};
        backend.recv(nothing, static_cast<int>(peer), kUnusedTag + context)->wait(Milliseconds(1));
      } catch (const std::exception&) {
        // as meant
      }
    }
  }
}

std::vector<int64_t> all_peers(const c10d::Backend& backend) {
  std::vector<int64_t> peers;
  for (int64_t rank = 0; rank < backend.getSize(); ++rank) {
    if (rank != backend.getRank()) {
      peers.push_back(rank);
    }
  }
  return peers;
}

bool on_main_thread() {
  return syscall(SYS_gettid) == getpid();
}

// In one piece, and without a lock that a thread which waits may hold.
void print(size_t rank, const std::string& text) {
  const std::string line = "zerocore on rank " + std::to_string(rank) + ": " + text + "\n";
  static_cast<void>(!write(STDERR_FILENO, line.data(), line.size()));
}

} // namespace

GroupWatch::GroupWatch(const std::string& name, const Group& control)
    : process_(getpid()),
      rank_(control->getRank()),
      size_(control->getSize()),
      roll_call_(control->getStore(), name, rank_, size_),
      limit_(timeout_of(*control)) {
  add_group(control);
}

bool GroupWatch::is_of(const Group& control) const {
  return backends_.front().lock() == control->getBackend(c10::DeviceType::CPU);
}

void GroupWatch::add_group(const Group& group) {
  const std::lock_guard lock(mutex_);
  groups_[group->getGroupName()] = static_cast<size_t>(group->getSize()) >= size_;
  for (const c10::Device device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (std::none_of(backends_.begin(), backends_.end(), [&](const auto& other) {
          return other.lock() == backend;
        })) {
      backends_.emplace_back(backend);
    }
  }
}

bool GroupWatch::has_group(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return groups_.contains(name);
}

void GroupWatch::add(Ledger& ledger, std::optional<double> stall_seconds) {
  const std::lock_guard lock(mutex_);
  ledgers_[num_models_++] = &ledger;
  if (const auto control = backends_.front().lock()) {
    const double timeout = Seconds(control->getBackendOptions()->timeout).count();
    limit_ = std::min(timeout, stall_seconds.value_or(timeout));
    limit_is_timeout_ = limit_ == timeout;
  }
}

void GroupWatch::remove(const Ledger& ledger) {
  if (process_ == getpid()) { // else another thread may have held the mutex
    const std::lock_guard lock(mutex_);
    std::erase_if(ledgers_, [&](const auto& entry) { return entry.second == &ledger; });
  }
}

// -- the threads that use the models --------------------------------------------------------

void GroupWatch::throw_message() const {
  TORCH_CHECK_WITH(DistBackendError, false, message_);
}

void GroupWatch::note_failure(const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    if (!overdue_since_ && sentence_.empty()) { // what fails then is a consequence
      cause_ = what;
      overdue_since_ = Clock::now();
    }
  }
  Watchdog::of_process().wake();
}

void GroupWatch::fail(const std::string& what) {
  check();
  note_failure(what);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kWatchdog, [this] { return raised_.load(); });
  TORCH_CHECK_WITH(DistBackendError, raised_.load(), what);
  throw_message();
}

int64_t GroupWatch::enter(const std::string& what, const std::string& group) {
  check();
  const std::lock_guard lock(mutex_);
  const auto known = groups_.find(group);
  const bool is_of_all = known != groups_.end() && known->second;
  NamedWait wait{what, 0, is_of_all && on_main_thread()};
  if (is_of_all) {
    auto before = std::ranges::find(begun_, what, &NamedWait::what);
    wait.count = before == begun_.end() ? 1 : before->count + 1;
    if (before != begun_.end() || begun_.size() == kKeptNames) {
      begun_.erase(before == begun_.end() ? begun_.begin() : before);
    }
    begun_.push_back(wait);
  }
  waits_.push_back({++num_waits_, Clock::now(), std::move(wait)});
  return num_waits_;
}

void GroupWatch::leave(int64_t token) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Wait& wait) { return wait.token == token; });
}

// -- the watchdog ---------------------------------------------------------------------------

Milliseconds GroupWatch::interval() const {
  const std::lock_guard lock(mutex_);
  return Milliseconds(std::clamp(static_cast<int64_t>(limit_ * 100), int64_t(50), int64_t(1000)));
}

// The longest, of the caller's mutex; numbers tell waits of models and others apart.
Silence GroupWatch::silence() {
  Silence longest;
  for (const auto& [id, ledger] : ledgers_) {
    if (const Silence own = ledger->silence(); own.length > longest.length) {
      longest = {own.length, own.number * num_models_ + id};
    }
  }
  for (const Wait& wait : waits_) {
    if (const auto length = Clock::now() - wait.since; length > longest.length) {
      longest = {length, -1 - wait.token};
    }
  }
  return longest;
}

void GroupWatch::tick() {
  if (raised_) {
    return;
  }
  std::unique_lock lock(mutex_);
  const Silence silence = this->silence();
  if (silence.length == Clock::duration::zero() || silence.number != silent_in_) {
    silent_in_ = silence.number;
    ask_after_ =
        std::chrono::duration_cast<Clock::duration>(std::min(kFirstQuestion, Seconds(limit_ / 4)));
  }
  if (!overdue_since_ && silence.length > Seconds(limit_)) {
    overdue_since_ = Clock::now();
  }
  const bool asks = silence.length > ask_after_;
  if (asks) {
    ask_after_ *= 2;
    asks_ = true;
  }
  const bool is_alone = sentence_.empty() && overdue_since_ &&
      (!roll_call_.can_ask() || Clock::now() - *overdue_since_ > kPatience);
  std::string sentence = sentence_;
  lock.unlock();
  if (is_alone) {
    sentence = describe_alone();
  }
  if (!sentence.empty()) {
    raise(std::move(sentence));
  }
}

void GroupWatch::raise(std::string message) {
  close_groups();
  {
    const std::lock_guard lock(mutex_);
    message_ = std::move(message) + (cause_.empty() ? "" : " (Here: " + cause_ + ")");
    raised_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  print(rank_, message_);
}

// See Note [Alarm].
void GroupWatch::close_groups() {
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
  {
    const std::lock_guard lock(mutex_);
    backends = backends_;
  }
  for (size_t i = 0; i < backends.size(); ++i) {
    const auto backend = backends[i].lock();
    if (!backend) {
      continue;
    }
    // Never destroyed: that would wait for collectives that cannot end.
    static auto* const kept = new std::vector<c10::intrusive_ptr<c10d::Backend>>();
    kept->push_back(backend);
    if (backend->getBackendName() == "gloo") {
      // The first group is connected with the peers of control messages alone.
      close_gloo(
          *backend,
          i == 0 ? Dissemination::peers(backend->getRank(), backend->getSize())
                 : all_peers(*backend));
    } else { // may wait for the device
      std::thread([backend] {
        try {
          backend->abort();
        } catch (const std::exception&) {
          // it can not
        }
      }).detach();
    }
  }
}

// -- what is told ---------------------------------------------------------------------------

std::string GroupWatch::waits_in() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, ledger] : ledgers_) {
    const LedgerState state = ledger->state();
    if (const LedgerEntry* entry = state.find(state.waiting)) {
      return entry->op + " of '" + entry->unit + "' of the model " + state.model;
    }
  }
  return waits_.empty() ? "" : waits_.front().wait.what;
}

RankReport GroupWatch::report() const {
  RankReport report;
  const std::string other = Watchdog::of_process().waits_in_other_than(*this);
  report.operation = Watchdog::of_process().operation();
  const std::lock_guard lock(mutex_);
  report.state = overdue_since_ ? RankState::Overdue : RankState::Lives;
  for (const auto& [id, ledger] : ledgers_) {
    report.models.push_back(ledger->state());
    report.models.back().id = id;
  }
  for (const Wait& wait : waits_) {
    report.waits.push_back(wait.wait);
  }
  report.begun = begun_;
  if (!other.empty()) {
    report.waits.push_back({other + " (of other ranks)", 0, false});
  }
  return report;
}

ParamNames GroupWatch::params() const {
  const std::lock_guard lock(mutex_);
  ParamNames params;
  for (const auto& [id, ledger] : ledgers_) {
    params[id] = ledger->params;
  }
  return params;
}

std::string GroupWatch::advice() const {
  const std::lock_guard lock(mutex_);
  return c10::str(
      "If a rank is only slow (it compiles or computes), raise ",
      limit_is_timeout_ ? "the timeout of the process group" : "ZEROCORE_STALL_SECONDS",
      ", which is ",
      limit_,
      limit_is_timeout_ ? "." : "; 0 waits for ever.");
}

// The sentence for all ranks; empty if they wait on.
std::string GroupWatch::conclude(const std::vector<RankReport>& reports) const {
  const bool is_overdue = report().state == RankState::Overdue ||
      std::ranges::any_of(reports, [](const RankReport& each) {
                            return each.state == RankState::Overdue;
                          });
  return is_overdue || is_deadlock(reports) ? describe(reports, params(), advice()) : "";
}

std::string GroupWatch::describe_alone() const {
  std::vector<RankReport> reports(size_);
  reports[rank_] = report();
  return describe(reports, params(), "", roll_call_.holder());
}

// -- the thread that talks to stores --------------------------------------------------------

void GroupWatch::talk() {
  if (raised_ || !roll_call_.can_ask()) {
    return;
  }
  bool wants = false;
  {
    const std::lock_guard lock(mutex_);
    wants = sentence_.empty() && (asks_ || overdue_since_);
  }
  try {
    const auto told = roll_call_.step(
        wants,
        [this] { return report(); },
        [this](const auto& reports) { return conclude(reports); });
    if (told) {
      const std::lock_guard lock(mutex_);
      asks_ = false;
      sentence_ = *told;
    }
    if (!told) {
      return;
    }
  } catch (const std::exception&) {
    roll_call_.give_up();
  }
  Watchdog::of_process().wake_watcher();
}

void GroupWatch::note_end(const std::string& error) {
  if (!roll_call_.can_ask()) {
    return;
  }
  RankReport report = this->report();
  report.state = RankState::Ended;
  report.error = error;
  try {
    roll_call_.note_end(report.encode(), raised_);
  } catch (const std::exception&) {
    // nobody can be told
  }
  roll_call_.give_up();
}

} // namespace zerocore
