// The alarm of one model, see Note [Alarm].
#include "watch/alarm.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
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

constexpr Seconds kWarning(60); // of silence, or half of the limit
constexpr Seconds kComparison(5); // of silence, or a quarter of the limit
constexpr Seconds kPatience(5); // of the watchdog with the store
constexpr Seconds kWatchdog(10); // of a thread that has failed with the watchdog
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

// In one piece, and without a lock that a thread which waits may hold.
void print(size_t rank, const std::string& text) {
  const std::string line = "zerocore on rank " + std::to_string(rank) + ": " + text + "\n";
  static_cast<void>(!write(STDERR_FILENO, line.data(), line.size()));
}

} // namespace

Alarm::Alarm(
    AlarmOptions options,
    const std::vector<Group>& groups,
    std::vector<std::string> params)
    : options_(std::move(options)),
      params_(std::move(params)),
      roll_call_(groups.at(0)->getStore(), options_.name, options_.rank, options_.size) {
  for (const Group& group : groups) {
    add_group(group);
  }
  const double timeout = timeout_of(*groups[0]);
  limit_ = std::min(timeout, options_.stall_seconds.value_or(timeout));
  limit_is_timeout_ = limit_ == timeout;
}

void Alarm::add_group(const Group& group) {
  const std::lock_guard lock(mutex_);
  group_names_.push_back(group->getGroupName());
  for (const c10::Device device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (std::none_of(backends_.begin(), backends_.end(), [&](const auto& other) {
          return other.lock() == backend;
        })) {
      backends_.emplace_back(backend);
    }
  }
}

bool Alarm::has_group(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return std::find(group_names_.begin(), group_names_.end(), name) != group_names_.end();
}

// -- the threads that use the model ---------------------------------------------------------

void Alarm::throw_message() const {
  TORCH_CHECK_WITH(DistBackendError, false, message_);
}

void Alarm::note_failure(const std::string& what) {
  {
    std::unique_lock lock(mutex_);
    if (call_ != RollKind::Alarm && !failed_) { // what fails then is a consequence
      cause_ = what;
    }
    failed_ = true;
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
  waits_.push_back({++num_waits_, std::move(what), Clock::now()});
  return num_waits_;
}

void Alarm::leave(int64_t token) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Wait& wait) { return wait.token == token; });
}

// -- the watchdog ---------------------------------------------------------------------------

Milliseconds Alarm::interval() const {
  return Milliseconds(std::clamp(static_cast<int64_t>(limit_ * 100), int64_t(50), int64_t(1000)));
}

// The longest; numbers below zero are of waits that are not in the ledger.
Silence Alarm::silence() {
  Silence longest = ledger_.silence();
  const std::lock_guard lock(mutex_);
  for (const Wait& wait : waits_) {
    const auto length = Clock::now() - wait.since;
    if (length > longest.length) {
      longest = {length, -1 - wait.token};
    }
  }
  return longest;
}

// False if it is under way, or one that outranks it.
bool Alarm::begin(RollKind call) {
  const std::lock_guard lock(mutex_);
  if (call_ >= call) {
    return false;
  }
  call_ = call;
  called_ = Clock::now();
  answer_.reset();
  return true;
}

// The call that a silence makes, if none is under way.
RollKind Alarm::due(const Silence& silence) {
  const std::lock_guard lock(mutex_);
  if (failed_ || is_certain_ || silence.length > Seconds(limit_)) {
    return RollKind::Alarm;
  }
  if (call_ != RollKind::None || silence.number == -1) {
    return RollKind::None;
  }
  if (std::exchange(compared_, silence.number) != silence.number) {
    next_compared_ = std::min(kComparison, Seconds(limit_ / 4));
  }
  prints_ = silence.length > std::min(kWarning, Seconds(limit_ / 2)) && silence.number != warned_;
  if (prints_) {
    warned_ = silence.number;
  } else if (silence.length <= next_compared_) {
    return RollKind::None;
  }
  next_compared_ = 2 * Seconds(silence.length);
  return RollKind::Warning;
}

void Alarm::tick() {
  if (raised_) {
    return;
  }
  if (begin(due(silence()))) {
    Watchdog::of_process().wake();
  }
  std::unique_lock lock(mutex_);
  if (call_ == RollKind::None || !(answer_ || Clock::now() - called_ > kPatience)) {
    return;
  }
  const std::optional<std::string> answer = std::exchange(answer_, std::nullopt);
  const bool is_alarm = call_ == RollKind::Alarm;
  const bool prints = !is_alarm && std::exchange(prints_, false) && !is_certain_;
  if (!is_alarm) {
    call_ = RollKind::None;
  }
  lock.unlock();
  const std::string text = answer ? *answer : describe_alone();
  if (is_alarm) {
    raise(text);
  } else if (prints && !text.empty()) {
    print(options_.rank, "warning: " + text);
  }
}

void Alarm::raise(std::string message) {
  close_groups();
  {
    const std::lock_guard lock(mutex_);
    message_ = std::move(message) + (cause_.empty() ? "" : " (Here: " + cause_ + ")");
    raised_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  print(options_.rank, message_);
}

// See Note [Alarm].
void Alarm::close_groups() {
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

std::string Alarm::waits_without_number() const {
  const std::lock_guard lock(mutex_);
  return waits_.empty() ? "" : waits_.front().what;
}

std::string Alarm::model() const {
  return options_.name.substr(options_.name.rfind(' ') + 1);
}

std::string Alarm::waits_in() const {
  const LedgerState state = ledger_.state();
  const auto entry = std::ranges::find(state.entries, state.waiting, &LedgerEntry::number);
  const std::string what = entry == state.entries.end() ? waits_without_number()
                                                        : entry->op + " of '" + entry->unit + "'";
  return what.empty() ? "" : what + " of the model " + model();
}

std::optional<ModelPosition> Alarm::position() const {
  return options_.needs_all ? std::optional(ledger_.position(options_.name)) : std::nullopt;
}

RankReport Alarm::report() const {
  RankReport report;
  report.answered = true;
  report.ledger = ledger_.state();
  report.elsewhere = waits_without_number();
  if (report.elsewhere.empty()) {
    report.elsewhere = Watchdog::of_process().waits_in_other_than(*this);
  }
  report.models = Watchdog::of_process().positions();
  return report;
}

std::string Alarm::advice() const {
  return c10::str(
      "If a rank is only slow (it evaluates or saves alone), raise ",
      limit_is_timeout_ ? "the timeout of the process group" : "ZEROCORE_STALL_SECONDS",
      ", which is ",
      limit_,
      limit_is_timeout_ ? "." : "; 0 waits for ever.");
}

std::string Alarm::describe_alone() const {
  std::vector<RankReport> reports(options_.size);
  reports[options_.rank] = report();
  return zerocore::describe(reports, params_, model(), advice(), roll_call_.holder());
}

std::string Alarm::describe(const std::vector<RankReport>& reports) {
  const bool is_certain = options_.needs_all && wait_for_ever(reports);
  {
    const std::lock_guard lock(mutex_);
    is_certain_ = is_certain_ || is_certain;
  }
  const std::string why = "The ranks wait for each other, so a longer timeout does not help.";
  return zerocore::describe(reports, params_, model(), is_certain ? why : advice());
}

// -- the thread that talks to stores --------------------------------------------------------

void Alarm::talk() {
  RollKind wanted = RollKind::None;
  {
    const std::lock_guard lock(mutex_);
    wanted = answer_ ? RollKind::None : call_;
  }
  std::string told;
  RollKind call = RollKind::None;
  try {
    do { // another rank's warning may come before this one's alarm
      call = raised_ ? RollKind::None : roll_call_.next(wanted);
      if (call != RollKind::None) {
        begin(call);
        roll_call_.tell(report());
        told = roll_call_.hear([this](const auto& all) { return describe(all); });
      }
    } while (call != RollKind::None && call < wanted);
  } catch (const std::exception&) {
    roll_call_.give_up();
  }
  if (!roll_call_.can_ask() && wanted != RollKind::None) {
    told = describe_alone();
  } else if (call == RollKind::None) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(told);
  }
  Watchdog::of_process().wake();
}

void Alarm::note_end(const std::string& how) {
  try {
    roll_call_.note_end(how);
  } catch (const std::exception&) {
    roll_call_.give_up();
  }
}

} // namespace zerocore
