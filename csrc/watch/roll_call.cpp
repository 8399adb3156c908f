// See Note [Roll call].
#include "watch/roll_call.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

namespace zerocore {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakStore = c10::weak_intrusive_ptr<c10d::Store>;

Store without_prefix(const Store& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
}

// Note [Names of hosts]
// torch looks up the names of both ends of each connection that a TCPStore makes or describes.
// Where the name server is slow each lookup takes seconds. So all models of a process share one
// connection, and nothing asks a store to describe itself.
Store shared_clone(const Store& base) {
  struct Cloned {
    WeakStore base, clone;
  };
  static std::mutex mutex;
  static auto* const known = new std::vector<Cloned>(); // a thread may outlive the rest
  const std::lock_guard lock(mutex);
  std::erase_if(
      *known, [](const Cloned& each) { return each.base.expired() || each.clone.expired(); });
  for (const Cloned& each : *known) {
    if (each.base.lock() == base) {
      return each.clone.lock();
    }
  }
  Store clone = base->clone();
  known->push_back({WeakStore(base), WeakStore(clone)});
  return clone;
}

// Others may call Python, for which the thread that waits may hold the lock.
bool is_local(c10d::Store& store) {
  return dynamic_cast<c10d::FileStore*>(&store) != nullptr ||
      dynamic_cast<c10d::HashStore*>(&store) != nullptr;
}

bool listens_at(int fd, uint16_t port) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    return false;
  }
  sockaddr_storage address{};
  size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) { // NOLINT
    return false;
  }
  // Both families of the network have the port in the same place.
  return (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
      ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port) == port; // NOLINT
}

// Whether this process is the server of a TCPStore, without which no rank can use it. False where
// the system does not tell.
bool serves(const Store& store) {
  const Store base = without_prefix(store);
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get());
  if (tcp == nullptr) {
    return false;
  }
  std::error_code error;
  const std::filesystem::directory_iterator open_files("/proc/self/fd", error);
  return std::any_of(begin(open_files), end(open_files), [&](const auto& file) {
    return listens_at(std::stoi(file.path().filename()), tcp->getPort());
  });
}

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kAnswer(3000); // what the others have to tell where they are
constexpr Milliseconds kSentence(3500); // what the one that reads has; before Alarm gives up
constexpr Milliseconds kPoll(50);
constexpr Milliseconds kOthers(1000); // what the rank that holds the store gives them at its end
constexpr const char* kHolder = "holder";

void wait_until(Clock::time_point deadline, const std::function<bool()>& is_so) {
  while (!is_so() && Clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
}

// A line of the rank, to a list that all of them append to.
void append(c10d::Store& store, const std::string& list, size_t rank, const std::string& text) {
  const std::string line = std::to_string(rank) + " " + text + "\n";
  if (store.hasExtendedApi()) {
    store.append(list, {line.begin(), line.end()});
    return;
  }
  for (;;) { // in a file
    const std::string before = store.check({list}) ? store.get_to_str(list) : "";
    if (store.compareSet(list, before, before + line) == before + line) {
      return;
    }
  }
}

} // namespace

void RollCall::note_holder(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  if (serves(store)) {
    store->set(kHolder, std::to_string(rank));
    store->check({kHolder}); // the answer comes behind it
  }
}

RollCall::RollCall(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& name,
    size_t rank,
    size_t size)
    : rank_(rank), size_(size) {
  Store base = without_prefix(store);
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get())) {
    address_ = tcp->getHost() + ":" + std::to_string(tcp->getPort());
    base = shared_clone(base);
  } else if (!is_local(*base)) {
    return;
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>("zerocore/" + name, base);
  if (!address_.empty() && store->check({kHolder})) {
    holder_ = std::stoll(store->get_to_str(kHolder));
  }
}

std::string RollCall::key(const char* what) const {
  return what + std::to_string(number_);
}

std::string RollCall::holder() const {
  const std::string at = address_.empty() ? "" : " at " + address_;
  if (holder_ < 0) {
    return "the store of the process group" + at;
  }
  return "rank " + std::to_string(holder_) + ", which holds the store" + at + ",";
}

RollKind RollCall::next(RollKind wanted) {
  if (store_ == nullptr) {
    return RollKind::None;
  }
  std::string made;
  const std::string own =
      (wanted == RollKind::Alarm ? "alarm " : "warning ") + std::to_string(rank_);
  if (wanted != RollKind::None) {
    made = store_->compareSet(key("call"), "", own);
  } else if (store_->check({key("call")})) {
    made = store_->get_to_str(key("call"));
  } else {
    return RollKind::None;
  }
  is_alarm_ = made.rfind("alarm", 0) == 0;
  is_own_ = made == own;
  return is_alarm_ ? RollKind::Alarm : RollKind::Warning;
}

void RollCall::tell(const RankReport& own) {
  told_ = Clock::now();
  const std::string text = own.encode();
  const std::string digest = std::to_string(std::hash<std::string>()(text));
  const std::string report = key("report") + "/" + digest;
  if (!store_->check({report})) {
    store_->set(report, text);
  }
  append(*store_, key("list"), rank_, digest);
  store_->add(key("answers"), 1);
}

std::string RollCall::hear(const Describe& describe) {
  std::string told;
  const std::string sentence = key("sentence");
  if (!is_own_ && !is_alarm_) {
    // nothing: the rank that warns says it
  } else if (is_own_ || (!wait_for_sentence() && store_->add(key("leaders"), 1) == 1)) {
    told = describe(collect());
    store_->set(sentence, told);
  } else {
    told = store_->get_to_str(sentence); // waits
  }
  if (is_alarm_) {
    store_->add("readers", 1);
  } else {
    ++number_;
  }
  return told;
}

// One request, unlike looking again and again.
bool RollCall::wait_for_sentence() {
  try {
    store_->wait({key("sentence")}, kSentence);
    return true;
  } catch (const std::exception&) {
    return store_->check({key("sentence")}); // throws if the store has failed
  }
}

// Of a list that ranks append to.
std::vector<std::pair<size_t, std::string>> RollCall::lines(const std::string& list) {
  std::vector<std::pair<size_t, std::string>> result;
  if (store_->check({list})) {
    std::istringstream in(store_->get_to_str(list));
    std::string text;
    for (size_t rank = 0; in >> rank && std::getline(in.ignore(), text);) {
      result.emplace_back(rank, text);
    }
  }
  return result;
}

// Counts before it reads the lists.
std::vector<RankReport> RollCall::collect() {
  std::vector<RankReport> reports(size_);
  const auto is_complete = [&] {
    const int64_t count = store_->add(key("answers"), 0) + store_->add("ended", 0);
    return count >= static_cast<int64_t>(size_);
  };
  wait_until(told_ + kAnswer, is_complete);
  for (const auto& [rank, how] : lines("ends")) {
    reports.at(rank).ended = how;
  }
  std::map<std::string, RankReport> known; // by digest
  for (const auto& [rank, digest] : lines(key("list"))) {
    if (!known.contains(digest)) {
      known[digest] = RankReport::decode(store_->get_to_str(key("report") + "/" + digest));
    }
    reports.at(rank) = known[digest];
  }
  return reports;
}

void RollCall::note_end(const std::string& how) {
  if (store_ == nullptr) {
    return;
  }
  if (!is_alarm_) {
    append(*store_, "ends", rank_, how);
    store_->add("ended", 1);
  }
  if (holder_ == static_cast<int64_t>(rank_)) { // its store ends with it
    wait_until(Clock::now() + kOthers, [&] {
      return is_alarm_ ? store_->add("readers", 0) >= store_->add(key("answers"), 0)
                       : store_->add("ended", 0) >= static_cast<int64_t>(size_);
    });
  }
  give_up();
}

} // namespace zerocore
