#include "watch/roll_call.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <thread>

namespace zerocore {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakStore = c10::weak_intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kAnswer(3000); // time for the reports of the other ranks
constexpr Milliseconds kReader(3500); // time for the reading rank; less than Alarm's patience
constexpr Milliseconds kOthers(1000); // time that rank 0 waits for the other ranks when it ends
constexpr Milliseconds kPoll(50);

// Note [Names of hosts]
// torch looks up the host names of both ends when a TCPStore connects or describes itself, which
// takes seconds with a slow name server. So all models of a process share one connection, and no
// store is asked to describe itself.
Store shared_clone(const Store& base) {
  static std::mutex mutex;
  static auto& last = *new std::pair(WeakStore(Store()), WeakStore(Store()));
  const std::lock_guard lock(mutex);
  Store clone = last.first.lock() == base ? last.second.lock() : nullptr;
  if (clone == nullptr) {
    clone = base->clone();
    last = {WeakStore(base), WeakStore(clone)};
  }
  return clone;
}

// Appends a record to a list of all ranks.
void append(c10d::Store& store, const std::string& list, size_t rank, const std::string& text) {
  const std::string record = std::to_string(rank) + " " + std::to_string(text.size()) + " " + text;
  if (store.hasExtendedApi()) {
    store.append(list, {record.begin(), record.end()});
    return;
  }
  for (;;) { // the store is a file
    const std::string before = store.check({list}) ? store.get_to_str(list) : "";
    if (store.compareSet(list, before, before + record) == before + record) {
      return;
    }
  }
}

} // namespace

RollCall::RollCall(const Store& store, const std::string& name, size_t rank, size_t size)
    : rank_(rank), size_(size) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  Store base = prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get())) {
    store_name_ = "the store at " + tcp->getHost() + ":" + std::to_string(tcp->getPort()) +
        ", which rank 0 holds unless a launcher does,";
    base = shared_clone(base);
  } else if (
      dynamic_cast<c10d::FileStore*>(base.get()) == nullptr &&
      dynamic_cast<c10d::HashStore*>(base.get()) == nullptr) {
    return; // the store may call Python, and the waiting thread may hold the interpreter's lock
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>("zerocore/" + name, base);
}

std::string RollCall::key(const char* what) const {
  return what + std::to_string(number_);
}

std::optional<std::string> RollCall::poll(
    bool asks,
    bool must_end,
    const Report& report,
    const Describe& describe) {
  if (store_ == nullptr) {
    return std::nullopt;
  }
  if (must_end && !std::exchange(must_end_, true)) {
    store_->add("must_end", 1);
  }
  if (!answered_at_) {
    if (asks) {
      reads_ = store_->add(key("call"), 1) == 1;
    } else if (!store_->check({key("call")})) {
      return std::nullopt;
    }
    append(*store_, key("reports"), rank_, report().encode());
    answered_at_ = Clock::now();
  }
  std::optional<std::string> sentence;
  if (store_->check({key("told")})) {
    sentence = store_->get_to_str(key("told"));
  } else {
    reads_ =
        reads_ || (Clock::now() - *answered_at_ > kReader && store_->add(key("readers"), 1) == 1);
    sentence = reads_ ? read(describe) : std::nullopt;
  }
  if (sentence) {
    ++number_;
    answered_at_.reset();
    reads_ = false;
  }
  return sentence;
}

// Returns the sentence, or nullopt while other ranks may still answer.
std::optional<std::string> RollCall::read(const Describe& describe) {
  std::vector<RankReport> reports(size_);
  for (const auto& [rank, how] : records("ends")) {
    reports.at(rank).ended = how;
  }
  for (const auto& [rank, text] : records(key("reports"))) {
    reports.at(rank) = RankReport::decode(text);
  }
  const bool is_complete = std::ranges::all_of(
      reports, [](const RankReport& each) { return each.answered || each.ended; });
  if (!is_complete && Clock::now() - *answered_at_ < kAnswer) {
    return std::nullopt;
  }
  std::string sentence = describe(reports, store_->check({"must_end"}));
  store_->set(key("told"), sentence);
  store_->deleteKey(key("reports")); // keeps the store small
  return sentence;
}

std::vector<std::pair<size_t, std::string>> RollCall::records(const std::string& list) {
  std::vector<std::pair<size_t, std::string>> result;
  std::istringstream in(store_->check({list}) ? store_->get_to_str(list) : "");
  size_t nbytes = 0;
  for (size_t rank = 0; in >> rank >> nbytes;) {
    std::string text(nbytes, '\0');
    in.ignore().read(text.data(), static_cast<std::streamsize>(nbytes));
    result.emplace_back(rank, std::move(text));
  }
  return result;
}

void RollCall::note_end(const std::string& how) {
  if (store_ != nullptr) {
    append(*store_, "ends", rank_, how);
    const auto deadline = Clock::now() + kOthers;
    while (rank_ == 0 && records("ends").size() < size_ && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPoll);
    }
  }
  give_up();
}

} // namespace zerocore
