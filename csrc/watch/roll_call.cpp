// See Note [Roll call].
#include "watch/roll_call.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <sstream>
#include <thread>

namespace zerocore {

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kAnswer(4000); // what the others have to tell where they are
constexpr Milliseconds kSentence(4500); // what the one that reads has; before GroupWatch gives up
constexpr Milliseconds kFirstPause(50), kLongestPause(400); // between two looks
constexpr Milliseconds kReaders(1000); // what others have to read an alarm at this rank's end

} // namespace

RollCall::RollCall(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& name,
    size_t rank,
    size_t size)
    : rank_(rank), size_(size), holder_("the store of the process group") {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  auto base = prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get())) {
    // Not by what a store says of itself: for that torch asks the name server.
    holder_ += " at " + tcp->getHost() + ":" + std::to_string(tcp->getPort()) +
        " (rank 0's, or the launcher's)";
    base = base->clone(); // other threads may block in the group's own connection
  } else if (
      dynamic_cast<const c10d::FileStore*>(base.get()) == nullptr &&
      dynamic_cast<const c10d::HashStore*>(base.get()) == nullptr) {
    return; // it may call Python, for which the thread that waits may hold the lock
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>("zerocore/" + name, std::move(base));
  can_ask_ = true;
}

std::string RollCall::key(const char* what) const {
  return what + std::to_string(number_);
}

std::optional<std::string> RollCall::step(bool wants, const Report& own, const Describe& describe) {
  const auto now = Clock::now();
  if (!told_) {
    const std::string call = key("call");
    const std::string rank = std::to_string(rank_);
    if (!wants && !store_->check({call})) {
      return std::nullopt;
    }
    is_own_ = store_->compareSet(call, "", rank) == rank;
    is_overdue_ = false;
    told_ = next_look_ = now;
    pause_ = kFirstPause;
  }
  const RankReport report = own();
  const bool is_first = *told_ == now;
  if (is_first || (report.state == RankState::Overdue && !is_overdue_)) {
    append(key("list"), report.encode());
    is_overdue_ = report.state == RankState::Overdue;
    store_->add(key("answers"), is_first ? 1 : 0);
  }
  if (now < next_look_) {
    return std::nullopt;
  }
  next_look_ = now + pause_;
  pause_ = std::min(2 * pause_, kLongestPause);
  const std::string sentence = key("sentence");
  const bool is_late = now > *told_ + (is_own_ ? kAnswer : kSentence);
  if (!store_->check({sentence})) {
    if (is_own_ ? !is_late && !is_complete() : !is_late || store_->add(key("readers"), 1) != 1) {
      return std::nullopt;
    }
    store_->set(sentence, describe(collect()));
  }
  std::string told = store_->get_to_str(sentence);
  if (!told.empty()) {
    store_->add("told", 1);
  }
  told_.reset();
  ++number_;
  return told;
}

// A rank may have answered and then ended, so the number of both is no proof.
bool RollCall::is_complete() {
  const int64_t num_answers = store_->add(key("answers"), 0);
  return num_answers + store_->add("ended", 0) >= static_cast<int64_t>(size_) &&
      std::ranges::none_of(
             collect(), [](const RankReport& report) { return report.state == RankState::Silent; });
}

// A report behind its rank; the last one of a rank counts.
void RollCall::append(const std::string& list, const std::string& text) {
  const std::string line = std::to_string(rank_) + " " + text;
  if (store_->hasExtendedApi()) {
    store_->append(list, {line.begin(), line.end()});
    return;
  }
  std::string before; // in a file
  do {
    before = store_->check({list}) ? store_->get_to_str(list) : "";
  } while (store_->compareSet(list, before, before + line) != before + line);
}

std::vector<RankReport> RollCall::collect() {
  std::vector<RankReport> reports(size_);
  for (const std::string& list : {key("list"), std::string("ends")}) {
    const std::string text = store_->check({list}) ? store_->get_to_str(list) : "";
    std::istringstream in(text);
    for (size_t rank = 0; in >> rank;) {
      reports.at(rank) = RankReport::decode(in);
    }
  }
  return reports;
}

void RollCall::note_end(const std::string& report, bool behind_alarm) {
  if (!behind_alarm) {
    append("ends", report);
    store_->add("ended", 1);
    return;
  }
  const auto deadline = Clock::now() + kReaders;
  --number_; // of the alarm
  while (store_->add("told", 0) < store_->add(key("answers"), 0) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kFirstPause);
  }
}

} // namespace zerocore
