// The alarm of one model, see Note [Alarm].
#include "runtime/alarm.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <thread>
#include <utility>

#include "runtime/watchdog.h"

namespace zerocore {

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kSlice(200); // how long the host waits before it looks for an alarm
constexpr Milliseconds kAnswer(3000); // what the others have to tell where they are
constexpr Milliseconds kPatience(6000); // for the watchdog, whose store may not answer
constexpr Milliseconds kPoll(50);
constexpr Milliseconds kReaders(1000);
constexpr size_t kToldEntries = 64;
// Tags of messages that are never sent.
constexpr int kUnusedTag = 0x5afe0000;
constexpr int kContexts = 8; // more than gloo has network devices

// A store of its own connection, as another thread may block in the group's; null if it may call
// Python, for which the thread that waits may hold the lock.
c10::intrusive_ptr<c10d::Store> open_store(
    c10::intrusive_ptr<c10d::Store> store,
    const std::string& name) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefixed->getUnderlyingNonPrefixStore();
  }
  if (dynamic_cast<c10d::TCPStore*>(store.get()) != nullptr) {
    store = store->clone();
  } else if (
      dynamic_cast<c10d::FileStore*>(store.get()) == nullptr &&
      dynamic_cast<c10d::HashStore*>(store.get()) == nullptr) {
    return nullptr;
  }
  return c10::make_intrusive<c10d::PrefixStore>("zerocore/" + name, std::move(store));
}

std::string key(const char* what, size_t rank) {
  return what + std::to_string(rank);
}

std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

} // namespace

Alarm::Alarm(
    AlarmOptions options,
    const std::vector<Group>& groups,
    c10::DeviceType device,
    std::vector<std::string> params)
    : options_(std::move(options)),
      params_(std::move(params)),
      store_(open_store(groups.at(0)->getStore(), options_.name)) {
  for (const Group& group : groups) {
    backends_.emplace_back(group->getBackend(device));
    in_slices_ = group->getBackend(device)->getBackendName() == "gloo";
  }
}

// -- the threads that use the model ---------------------------------------------------------

void Alarm::throw_message() const {
  TORCH_CHECK_WITH(DistBackendError, false, message_);
}

void Alarm::wait(c10d::Work& work) const {
  if (!in_slices_) {
    work.wait();
    return;
  }
  while (true) {
    check();
    try {
      work.wait(kSlice);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        throw;
      }
    }
  }
}

void Alarm::fail(const std::string& what) {
  check();
  const bool is_cause = !comparing_;
  std::unique_lock lock(mutex_);
  failed_ = true;
  Watchdog::of_process().wake();
  changed_.wait_for(lock, kPatience, [this] { return raised_.load(); });
  if (!raised_) {
    message_ = "the ranks could not be compared, as the store of the process group does not answer";
    raised_ = true;
  }
  TORCH_CHECK_WITH(DistBackendError, false, message_, is_cause ? " (Here: " + what + ")" : "");
}

// -- the watchdog ---------------------------------------------------------------------------

void Alarm::tick() {
  if (!raised_ && has_reason()) {
    raise();
  }
}

bool Alarm::has_reason() {
  const auto limit = std::chrono::duration<double>(options_.stall_seconds);
  if (failed_ || ledger_.is_stalled(std::chrono::duration_cast<Clock::duration>(limit))) {
    return true;
  }
  try {
    return store_ != nullptr && store_->check({"alarm"});
  } catch (const std::exception&) {
    store_ = nullptr; // its server has ended
    return false;
  }
}

void Alarm::raise() {
  comparing_ = true;
  std::string message = compare();
  close_groups();
  {
    const std::lock_guard lock(mutex_);
    if (!raised_) {
      message_ = std::move(message);
      raised_.store(true, std::memory_order_release);
    }
  }
  changed_.notify_all();
}

std::string Alarm::compare() {
  const int seconds = static_cast<int>(options_.stall_seconds);
  const std::string advice =
      "If a rank is only slow (it evaluates or saves alone), raise "
      "ZEROCORE_STALL_SECONDS, which is " +
      std::to_string(seconds) + "; 0 waits for ever.";
  std::vector<RankReport> reports(options_.size);
  for (RankReport& report : reports) {
    report.missing = true;
  }
  try {
    if (store_ != nullptr) {
      publish();
      reports = collect();
    }
  } catch (const std::exception&) {
    store_ = nullptr;
  }
  reports[options_.rank].missing = false;
  reports[options_.rank].ledger = ledger_.state(kToldEntries);
  return describe(reports, params_, advice);
}

void Alarm::publish() {
  RankReport report;
  report.ledger = ledger_.state(kToldEntries);
  report.elsewhere = Watchdog::of_process().waits_in_other_than(*this);
  store_->set(key("report", options_.rank), report.encode());
  store_->add("answers", 1);
  store_->set("alarm", "1");
}

std::vector<RankReport> Alarm::collect() {
  const auto deadline = Clock::now() + kAnswer;
  while (store_->add("answers", 0) < static_cast<int64_t>(options_.size) &&
         Clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
  std::vector<RankReport> reports(options_.size);
  for (size_t rank = 0; rank < options_.size; ++rank) {
    if (store_->check({key("report", rank)})) {
      reports[rank] = RankReport::decode(to_text(store_->get(key("report", rank))));
      ++num_answers_;
    } else if (store_->check({key("end", rank)})) {
      reports[rank].ended = to_text(store_->get(key("end", rank)));
    } else {
      reports[rank].missing = true;
    }
  }
  store_->add("readers", 1);
  return reports;
}

// See Note [Alarm]. Gloo closes all its connections when one receive has waited for too long.
void Alarm::close_groups() {
  for (const auto& weak : backends_) {
    const auto backend = weak.lock();
    if (!backend) {
      continue;
    }
    // Never destroyed: that would wait for collectives that cannot end.
    static auto* const kept = new std::vector<c10::intrusive_ptr<c10d::Backend>>();
    kept->push_back(backend);
    if (backend->getBackendName() != "gloo") {
      backend->abort();
      continue;
    }
    for (int i = 0; i < backend->getSize() * kContexts; ++i) {
      const int peer = i % backend->getSize();
      try {
        std::vector<at::Tensor> nothing = {at::zeros({1}, at::kByte)};
        if (peer != backend->getRank()) {
          backend->recv(nothing, peer, kUnusedTag + i / backend->getSize())->wait(Milliseconds(1));
        }
      } catch (const std::exception&) {
        // as meant
      }
    }
  }
}

std::string Alarm::waits_in() const {
  const LedgerState state = ledger_.state(kToldEntries);
  for (const LedgerEntry& entry : state.entries) {
    if (entry.number == state.waiting) {
      return entry.op + " of '" + entry.unit + "'";
    }
  }
  return "";
}

void Alarm::note_end(const std::string& how) {
  if (store_ == nullptr) {
    return;
  }
  try {
    if (!raised_) {
      store_->set(key("end", options_.rank), how);
      store_->add("answers", 1);
      return;
    }
    const auto deadline = Clock::now() + kReaders;
    while (store_->add("readers", 0) < static_cast<int64_t>(num_answers_) &&
           Clock::now() < deadline) {
      std::this_thread::sleep_for(kPoll);
    }
  } catch (const std::exception&) {
    store_ = nullptr;
  }
}

} // namespace zerocore
