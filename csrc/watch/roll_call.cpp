// See Note [Roll call].
#include "watch/roll_call.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <thread>
#include <utility>

namespace zerocore {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kAnswer(3000); // what the others have to tell where they are
constexpr Milliseconds kSentence(4000); // what the one that reads has in addition to that
constexpr Milliseconds kPoll(50);
constexpr Milliseconds kReaders(1000);
constexpr const char* kHolder = "holder";

std::string end_key(size_t rank) {
  return "end" + std::to_string(rank);
}

// Until it is so; false if the time is over.
bool wait_until(Milliseconds patience, const std::function<bool()>& is_so) {
  const auto deadline = Clock::now() + patience;
  while (!is_so()) {
    if (Clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

} // namespace

// A connection of its own, as another thread may block in the group's. No store that may call
// Python, for which the thread that waits may hold the lock.
RollCall::RollCall(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& name,
    size_t rank,
    size_t size)
    : rank_(rank), size_(size) {
  c10::intrusive_ptr<c10d::Store> base = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(base.get())) {
    base = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get());
  if (tcp == nullptr && dynamic_cast<c10d::FileStore*>(base.get()) == nullptr &&
      dynamic_cast<c10d::HashStore*>(base.get()) == nullptr) {
    return;
  }
  const std::string prefix = "zerocore/" + name;
  if (tcp == nullptr) {
    store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(base));
    return;
  }
  address_ = tcp->getHost() + ":" + std::to_string(tcp->getPort());
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, base->clone());
  if (tcp->repr().find("server=<nullptr>") == std::string::npos) {
    holder_ = static_cast<int64_t>(rank_);
    store_->set(kHolder, std::to_string(rank_));
  }
}

std::string RollCall::key(const char* what) const {
  return what + std::to_string(number_);
}

std::string RollCall::key(const char* what, size_t rank) const {
  return key(what) + "/" + std::to_string(rank);
}

// The server may be that of a launcher: then no rank ever says that it is the one.
void RollCall::find_holder() {
  if (holder_ < 0 && !address_.empty() && holder_polls_-- > 0 && store_->check({kHolder})) {
    holder_ = std::stoll(store_->get_to_str(kHolder));
  }
}

std::string RollCall::holder() const {
  const std::string at = address_.empty() ? "" : " at " + address_;
  if (holder_ < 0) {
    return "the store of the process group" + at;
  }
  return "rank " + std::to_string(holder_) + ", which holds the store" + at + ",";
}

Call RollCall::next(Call wanted) {
  if (store_ == nullptr) {
    return Call::None;
  }
  find_holder();
  std::string made;
  const std::string own = (wanted == Call::Alarm ? "alarm " : "warning ") + std::to_string(rank_);
  if (wanted != Call::None) {
    made = store_->compareSet(key("call"), "", own);
  } else if (store_->check({key("call")})) {
    made = store_->get_to_str(key("call"));
  } else {
    return Call::None;
  }
  is_alarm_ = made.rfind("alarm", 0) == 0;
  is_own_ = made == own;
  return is_alarm_ ? Call::Alarm : Call::Warning;
}

std::string RollCall::answer(const RankReport& own, const Describe& describe) {
  store_->set(key("report", rank_), own.encode());
  store_->add(key("answers"), 1);
  std::string told;
  const std::string sentence = key("sentence");
  const auto has_sentence = [&] { return store_->check({sentence}); };
  if (is_own_ || (is_alarm_ && !wait_until(kSentence, has_sentence))) {
    told = describe(collect());
    if (is_own_) {
      store_->set(sentence, told);
    }
  } else if (is_alarm_) {
    told = store_->get_to_str(sentence);
  }
  if (is_alarm_) {
    store_->add("readers", 1);
  } else {
    ++number_;
  }
  return told;
}

std::vector<RankReport> RollCall::collect() {
  std::vector<RankReport> reports(size_);
  for (RankReport& report : reports) {
    report.missing = true;
  }
  wait_until(kAnswer, [&] {
    bool complete = true;
    for (size_t rank = 0; rank < size_; ++rank) {
      complete &= !reports[rank].missing || read(rank, reports[rank]);
    }
    return complete;
  });
  return reports;
}

// False if the rank has written nothing yet.
bool RollCall::read(size_t rank, RankReport& report) {
  if (store_->check({key("report", rank)})) {
    report = RankReport::decode(store_->get_to_str(key("report", rank)));
    return true;
  }
  if (store_->check({end_key(rank)})) {
    report.ended = store_->get_to_str(end_key(rank));
    report.missing = false;
    return true;
  }
  return false;
}

void RollCall::note_end(const std::string& how) {
  if (store_ == nullptr) {
    return;
  }
  if (!is_alarm_) {
    store_->set(end_key(rank_), how);
    return;
  }
  wait_until(kReaders, [&] { return store_->add("readers", 0) >= store_->add(key("answers"), 0); });
}

} // namespace zerocore
