// The alarm of one model, see Note [Alarm].
#include "watch/alarm.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "common/math.h"
#include "plan/dissemination.h"
#include "watch/outside_ledger.h"

namespace zerocore {

namespace {

using Milliseconds = std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kFirstCall(5); // wait before the first roll call, or a quarter of the limit
constexpr Seconds kPatience(5); // longest duration of a roll call
constexpr Seconds kWatchdog(10); // how long a failed thread waits for the alarm
constexpr Milliseconds kEndPatience(1500); // how long the end of the process waits
constexpr Milliseconds kInCall(100); // time between checks of the store during a roll call
constexpr double kDefaultSeconds = 1800; // limit for a group without a timeout
// Tags that no message has.
constexpr int kUnusedTag = 0x5afe0000;
constexpr int kContexts = 8; // more than gloo has network devices

// Returns the shortest timeout of the group's backends, in seconds.
double timeout_of(c10d::ProcessGroup& group) {
  double seconds = kDefaultSeconds;
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const auto options = group.getBackend(device.type())->getBackendOptions();
      seconds = std::min(seconds, Seconds(options->timeout).count());
    } catch (const std::exception&) {
      // the backend has no timeout
    }
  }
  return seconds;
}

// Closes all of gloo's connections. A receive that times out closes them, unless its peer is gone,
// so this tries all peers. A control group has connections with some ranks only.
void close_gloo(c10d::Backend& backend, bool is_control) {
  std::vector<int64_t> peers = Dissemination::peers(backend.getRank(), backend.getSize());
  for (int64_t rank = 0; rank < backend.getSize() && !is_control; ++rank) {
    peers.push_back(rank);
  }
  for (int context = 0; context < kContexts; ++context) {
    for (const int64_t peer : peers) {
      try {
        std::vector<at::Tensor> nothing = {at::zeros({1}, at::kByte)};
        backend.recv(nothing, static_cast<int>(peer), kUnusedTag + context)->wait(Milliseconds(1));
      } catch (const std::exception&) {
        // expected: the receive timed out
      }
    }
  }
}

// Leaks the backend: its destructor would wait for collectives that cannot end.
void keep(c10::intrusive_ptr<c10d::Backend> backend) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<c10::intrusive_ptr<c10d::Backend>>();
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(backend));
}

} // namespace

Alarm::Alarm(
    AlarmOptions options,
    const std::vector<Group>& groups,
    std::vector<std::string> params)
    : options_(std::move(options)),
      params_(std::move(params)),
      model_(options_.name.substr(options_.name.rfind(' ') + 1)),
      roll_call_(groups.at(0)->getStore(), options_.name, options_.rank, options_.size) {
  for (const Group& group : groups) {
    add_group(group);
  }
  const double timeout = timeout_of(*groups[0]);
  limit_ = Seconds(std::min(timeout, options_.stall_seconds.value_or(timeout)));
  limit_is_timeout_ = limit_.count() == timeout;
}

void Alarm::add_group(const Group& group) {
  const std::lock_guard lock(mutex_);
  group_names_.push_back(group->getGroupName());
  for (const c10::Device device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (std::ranges::none_of(
            backends_, [&](const auto& other) { return other.lock() == backend; })) {
      backends_.emplace_back(backend);
    }
  }
}

LedgerGroup* Alarm::in_ledger(c10d::ProcessGroup& group) {
  return &ledger_.group(options_.name + " " + unique_name(group));
}

bool Alarm::has_group(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::find(group_names_, name) != group_names_.end();
}

// -- the threads that use the model ---------------------------------------------------------

void Alarm::throw_message() const {
  TORCH_CHECK_WITH(DistBackendError, false, message_);
}

void Alarm::note_failure(const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    if (!must_end_ && !in_call_) { // else the failure may be a consequence
      cause_ = " (Here: " + what + ")";
    }
    must_end_ = must_end_.value_or(Clock::now());
  }
  Watchdog::of_process().wake();
}

void Alarm::fail(const std::string& what) {
  check();
  note_failure(what);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kWatchdog, [this] { return raised_.load(); });
  TORCH_CHECK_WITH(DistBackendError, raised_.load(), what);
  throw_message();
}

int64_t Alarm::enter(std::string what) {
  check();
  const std::lock_guard lock(mutex_);
  waits_[++num_waits_] = {std::move(what), Clock::now()};
  return num_waits_;
}

void Alarm::leave(int64_t token) {
  const std::lock_guard lock(mutex_);
  waits_.erase(token);
}

// -- the thread that watches ----------------------------------------------------------------

Milliseconds Alarm::interval() const {
  return Milliseconds(
      std::clamp(static_cast<int64_t>(limit_.count() * 100), int64_t(50), int64_t(1000)));
}

void Alarm::tick() {
  if (raised_) {
    return;
  }
  const auto now = Clock::now();
  std::unique_lock lock(mutex_);
  silence_ = ledger_.silence();
  for (const auto& [_, wait] : waits_) {
    silence_ = std::max<Seconds>(silence_, now - wait.since);
  }
  const Seconds first = std::min(kFirstCall, limit_ / 4);
  if (silence_ < first) {
    next_call_ = first;
  }
  const bool begins = !must_end_ && silence_ > limit_;
  if (begins) {
    must_end_ = now;
  }
  const bool gives_up = must_end_ && now - *must_end_ > kPatience;
  lock.unlock();
  if (begins) {
    Watchdog::of_process().wake();
  } else if (gives_up) {
    raise_alone();
  }
}

// Raises the alarm with the knowledge of this rank alone.
void Alarm::raise_alone() {
  std::vector<RankReport> reports(options_.size);
  reports[options_.rank] = report();
  raise(zerocore::describe(reports, params_, model_, advice(), roll_call_.store_name()));
}

void Alarm::raise(std::string message) {
  {
    const std::lock_guard lock(mutex_);
    if (!message_.empty()) {
      return;
    }
    message_ = std::move(message) + cause_;
  }
  close_groups();
  {
    const std::lock_guard lock(mutex_);
    raised_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  // Not through a C++ stream: the waiting thread may hold the stream's lock.
  const std::string line =
      "zerocore on rank " + std::to_string(options_.rank) + ": " + message_ + "\n";
  static_cast<void>(!write(STDERR_FILENO, line.data(), line.size()));
}

void Alarm::close_groups() {
  std::unique_lock lock(mutex_);
  const auto backends = backends_;
  lock.unlock();
  for (size_t i = 0; i < backends.size(); ++i) {
    const auto backend = backends[i].lock();
    if (!backend) {
      continue;
    }
    keep(backend);
    if (backend->getBackendName() == "gloo") {
      close_gloo(*backend, i == 0);
    } else { // may block on the device
      std::thread([backend] {
        try {
          backend->abort();
        } catch (const std::exception&) {
          // the backend cannot abort
        }
      }).detach();
    }
  }
}

// -- reports ---------------------------------------------------------------------------------

// Reports on this model alone.
RankReport Alarm::own_report() const {
  RankReport report = ledger_.report();
  const std::lock_guard lock(mutex_);
  report.elsewhere = waits_.empty() ? "" : waits_.begin()->second.what;
  return report;
}

// Names the model and its collective in which the process waits; empty without a wait.
std::string Alarm::waits_in() const {
  const RankReport own = own_report();
  const LedgerEntry* entry = own.find(own.waiting);
  const std::string what = entry == nullptr ? own.elsewhere : entry->what;
  return what.empty() ? "" : what + " of the model " + model_;
}

// Counts a thread as waiting outside of the ledgers only if it waited while they were read.
RankReport Alarm::report() const {
  const auto before = OutsideLedger::of_process().positions();
  RankReport report = own_report();
  for (const auto& other : Watchdog::of_process().alarms()) {
    if (other.get() != this) {
      std::ranges::copy(other->own_report().groups, std::back_inserter(report.groups));
      report.elsewhere = report.elsewhere.empty() ? other->waits_in() : report.elsewhere;
    }
  }
  for (GroupPosition& each : OutsideLedger::of_process().positions()) {
    const auto was = std::ranges::find(before, each.name, &GroupPosition::name);
    if (was == before.end() || was->waiting != each.waiting) {
      each.waiting = -1;
    }
    report.groups.push_back(std::move(each));
  }
  return report;
}

std::string Alarm::advice() const {
  return c10::str(
      "If a rank is only slow (it evaluates or saves alone), raise ",
      limit_is_timeout_ ? "the timeout of the process group" : "ZEROCORE_STALL_SECONDS",
      ", which is ",
      limit_.count(),
      limit_is_timeout_ ? "." : "; 0 waits for ever.");
}

std::string Alarm::describe(const std::vector<RankReport>& reports, bool must_end) const {
  const bool for_ever = wait_for_ever(reports);
  if (!for_ever && !must_end) {
    return "";
  }
  const std::string why = "The ranks wait for each other, so a longer timeout does not help.";
  return zerocore::describe(reports, params_, model_, for_ever ? why : advice());
}

// -- the thread that talks to stores --------------------------------------------------------

bool Alarm::talk() {
  std::unique_lock lock(mutex_);
  const bool must_end = must_end_.has_value();
  const bool asks = must_end || silence_ > next_call_;
  lock.unlock();
  if (raised_) {
    return false;
  }
  std::optional<std::string> told;
  try {
    told = roll_call_.poll(
        asks,
        must_end,
        [this] { return report(); },
        [this](const auto& reports, bool ends) { return describe(reports, ends); });
  } catch (const std::exception&) {
    roll_call_.give_up();
  }
  if (told && !told->empty()) {
    raise(std::move(*told));
  } else if (must_end && !roll_call_.can_ask()) {
    raise_alone();
  }
  lock.lock();
  in_call_ = roll_call_.is_open();
  if (told) {
    next_call_ = 2 * silence_;
  }
  return in_call_;
}

void Alarm::note_end(const std::string& how) {
  try {
    roll_call_.note_end(how);
  } catch (const std::exception&) {
    roll_call_.give_up();
  }
}

// -- the threads of the process ------------------------------------------------------------

// Never destroyed: a thread that a dead store blocks may outlive all other objects of the process.
Watchdog& Watchdog::of_process() {
  static std::atomic<Watchdog*> current = nullptr;
  Watchdog* watchdog = current.load();
  if (watchdog == nullptr || watchdog->process_ != getpid()) {
    auto* made = new Watchdog(getpid());
    if (current.compare_exchange_strong(watchdog, made)) {
      return *made;
    }
    delete made; // another thread was faster
  }
  return *watchdog;
}

void Watchdog::add(std::shared_ptr<Alarm> alarm) {
  const std::lock_guard lock(mutex_);
  interval_ = std::min(interval_, alarm->interval());
  alarms_.push_back(std::move(alarm));
  for (; num_running_ < 2; ++num_running_) {
    threads_.emplace_back([this, talks = num_running_ == 1] { run(talks); });
  }
  static const int registered = std::atexit([] { of_process().stop(); });
  static_cast<void>(registered);
}

bool Watchdog::remove(const Alarm* alarm) {
  const std::lock_guard lock(mutex_);
  return std::erase_if(alarms_, [&](const auto& each) { return each.get() == alarm; }) > 0;
}

std::vector<std::shared_ptr<Alarm>> Watchdog::alarms() {
  const std::lock_guard lock(mutex_);
  return alarms_;
}

std::shared_ptr<Alarm> Watchdog::alarm_of(const std::string& group) {
  for (auto& alarm : alarms()) {
    if (alarm->has_group(group)) {
      return alarm;
    }
  }
  return nullptr;
}

void Watchdog::add_group(const std::string& group, const std::string& beside) {
  for (const auto& alarm : alarms()) {
    if (alarm->has_group(beside) && !alarm->has_group(group)) {
      alarm->add_group(c10d::resolve_process_group(group));
    }
  }
}

void Watchdog::note_end(const std::string& how) {
  std::unique_lock lock(mutex_);
  if (num_running_ > 0) {
    end_ = how;
    changed_.notify_all();
    changed_.wait_for(lock, kEndPatience, [this] { return !end_; });
  }
}

void Watchdog::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const Milliseconds patience = end_ ? Milliseconds(0) : kEndPatience; // `end_`: the store hangs
  const bool ended = changed_.wait_for(lock, patience, [this] { return num_running_ == 0; });
  lock.unlock();
  for (std::thread& thread : threads_) {
    ended ? thread.join() : thread.detach();
  }
}

void Watchdog::run(bool talks) {
  std::unique_lock lock(mutex_);
  for (bool in_call = false; !stopping_;) {
    const auto alarms = alarms_;
    const std::optional<std::string> end = talks ? end_ : std::nullopt;
    lock.unlock();
    in_call = false;
    for (const auto& alarm : alarms) {
      if (!talks) {
        alarm->tick();
      } else if (end) {
        alarm->note_end(*end);
      } else {
        in_call = alarm->talk() || in_call;
      }
    }
    lock.lock();
    if (end) {
      end_.reset();
      changed_.notify_all();
    }
    if (!stopping_ && !(talks && end_)) {
      changed_.wait_for(lock, in_call ? std::min(kInCall, interval_) : interval_);
    }
  }
  --num_running_;
  changed_.notify_all();
}

} // namespace zerocore
