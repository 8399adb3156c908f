// Reports a rank's last collectives, and makes one sentence from the reports of all ranks.
#include "watch/ledger.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

namespace zerocore {

LedgerGroup& Ledger::group(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(groups_, name, &LedgerGroup::name);
  return found == groups_.end() ? groups_.emplace_back(name) : *found;
}

int64_t this_thread() {
  static thread_local const auto thread =
      static_cast<int64_t>(std::hash<std::thread::id>()(std::this_thread::get_id()) | 1);
  return thread;
}

int64_t Ledger::begin(LedgerGroup& group, const char* op, const std::string& unit, int64_t nbytes) {
  const int64_t number = next_.load(std::memory_order_relaxed);
  const int64_t number_in_group = group.next.load(std::memory_order_relaxed);
  Slot& slot = slots_[number % kKept];
  slot.group.store(&group, std::memory_order_relaxed);
  slot.number_in_group.store(number_in_group, std::memory_order_relaxed);
  slot.op.store(op, std::memory_order_relaxed);
  slot.unit.store(&unit, std::memory_order_relaxed);
  slot.nbytes.store(nbytes, std::memory_order_relaxed);
  slot.done.store(false, std::memory_order_relaxed);
  group.thread.store(this_thread(), std::memory_order_relaxed);
  group.next.store(number_in_group + 1, std::memory_order_release);
  next_.store(number + 1, std::memory_order_release);
  return number;
}

void Ledger::begin_wait(int64_t number) {
  waiting_.store(number, std::memory_order_relaxed);
  num_waits_.store(num_waits_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
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

RankReport Ledger::report() const {
  const std::lock_guard lock(mutex_);
  RankReport report;
  report.answered = true;
  report.waiting = waiting_.load(std::memory_order_relaxed);
  report.trainable = trainable_;
  const int64_t next = next_.load(std::memory_order_acquire);
  for (int64_t number = std::max(oldest_, next - static_cast<int64_t>(kKept)); number < next;
       ++number) {
    const Slot& slot = slots_[number % kKept];
    std::string what = std::string(slot.op) + " of '" + *slot.unit.load() + "' (" +
        std::to_string(slot.nbytes) + " bytes)";
    report.entries.push_back({number, slot.done, std::move(what)});
  }
  report.groups = positions();
  return report;
}

// Counts the host as waiting only if one wait lasted during the whole read. A collective that was
// not issued then is issued after this wait.
std::vector<GroupPosition> Ledger::positions() const {
  const int64_t wait = num_waits_.load(std::memory_order_acquire);
  const int64_t waiting = waiting_.load(std::memory_order_acquire);
  std::vector<GroupPosition> positions;
  for (const LedgerGroup& group : groups_) {
    positions.push_back(
        {group.name, group.next.load(std::memory_order_acquire), -1, group.thread, ""});
  }
  if (waiting < oldest_ || wait != num_waits_.load(std::memory_order_acquire) ||
      waiting != waiting_.load(std::memory_order_acquire)) {
    return positions;
  }
  const Slot& slot = slots_[waiting % kKept];
  for (GroupPosition& each : positions) {
    if (each.name == slot.group.load()->name) {
      each.waiting = slot.number_in_group;
      each.what = std::string(slot.op) + " of '" + *slot.unit.load() + "'";
    }
  }
  return positions;
}

std::chrono::steady_clock::duration Ledger::silence() {
  const auto now = std::chrono::steady_clock::now();
  const int64_t waiting = waiting_.load(std::memory_order_relaxed);
  if (waiting != seen_) {
    seen_ = waiting;
    seen_since_ = now;
  }
  return waiting < 0 ? now - now : now - seen_since_;
}

void Ledger::forget() {
  const std::lock_guard lock(mutex_);
  oldest_ = next_.load(std::memory_order_relaxed);
  end_wait();
}

const LedgerEntry* RankReport::find(int64_t number) const {
  const auto found = std::ranges::find(entries, number, &LedgerEntry::number);
  return found == entries.end() ? nullptr : &*found;
}

std::string RankReport::encode() const {
  std::ostringstream out;
  out << waiting << '\n' << trainable << '\n' << elsewhere << '\n' << groups.size() << '\n';
  for (const GroupPosition& each : groups) {
    out << each.next << ' ' << each.waiting << ' ' << each.thread << ' ' << each.name << '\n'
        << each.what << '\n';
  }
  for (const LedgerEntry& entry : entries) {
    out << entry.number << ' ' << entry.done << ' ' << entry.what << '\n';
  }
  return out.str();
}

RankReport RankReport::decode(const std::string& text) {
  RankReport report;
  report.answered = true;
  std::istringstream in(text);
  size_t num_groups = 0;
  std::getline((in >> report.waiting).ignore(), report.trainable);
  std::getline(in, report.elsewhere);
  report.groups.resize((in >> num_groups, num_groups));
  for (GroupPosition& each : report.groups) {
    std::getline((in >> each.next >> each.waiting >> each.thread).ignore(), each.name);
    std::getline(in, each.what);
  }
  LedgerEntry entry;
  while (in >> entry.number >> entry.done) {
    std::getline(in.ignore(), entry.what);
    report.entries.push_back(entry);
  }
  return report;
}

namespace {

using Ranks = std::vector<size_t>;
using Reports = std::vector<RankReport>;

std::string name_ranks(const Ranks& ranks) {
  constexpr size_t kNamed = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() <= kNamed ? text
                                : text + " and " + std::to_string(ranks.size() - kNamed) + " more";
}

// Returns the number of the first collective in which ranks differ, or -1.
int64_t first_difference(const Reports& reports) {
  std::map<int64_t, std::string> known;
  int64_t first = -1;
  for (const RankReport& report : reports) {
    for (const LedgerEntry& entry : report.entries) {
      if (known.try_emplace(entry.number, entry.what).first->second != entry.what) {
        first = first < 0 ? entry.number : std::min(first, entry.number);
      }
    }
  }
  return first;
}

// Returns the oldest collective in which a rank waits; without a wait, the newest that was issued.
int64_t stuck_in(const Reports& reports) {
  int64_t oldest = -1;
  int64_t newest = 0;
  for (const RankReport& report : reports) {
    if (report.waiting >= 0 && (oldest < 0 || report.waiting < oldest)) {
      oldest = report.waiting;
    }
    newest = std::max(newest, report.entries.empty() ? 0 : report.entries.back().number);
  }
  return oldest < 0 ? newest : oldest;
}

bool any_waits_in(const Reports& reports, int64_t number) {
  return std::ranges::any_of(reports, [&](const auto& each) { return each.waits_in(number); });
}

// Says where the rank is, relative to a collective.
std::string state_of(const RankReport& report, int64_t number) {
  const LedgerEntry* entry = report.find(number);
  if (report.ended) {
    return "ended the program" +
        (report.ended->empty() ? " without an error, maybe after fewer steps" : *report.ended);
  }
  if (!report.answered) {
    return "did not answer within 3 s: killed, stopped, out of reach, or on a machine that is too "
           "busy";
  }
  if (report.waits_in(number) || report.elsewhere.empty()) {
    return entry == nullptr       ? "has not reached it (in no collective of this model)"
        : report.waits_in(number) ? "waits in " + entry->what
                                  : (entry->done ? "has completed " : "has issued ") + entry->what;
  }
  return "waits in " + report.elsewhere;
}

// Lists the ranks in each state. If the others could not be asked, only lists ranks that answered.
std::string name_states(const Reports& reports, int64_t number, bool asked) {
  std::map<std::string, Ranks> ranks;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (asked || reports[rank].answered) {
      ranks[state_of(reports[rank], number)].push_back(rank);
    }
  }
  std::string text;
  for (const auto& [state, of] : ranks) {
    text += (text.empty() ? "" : "; ") + std::string(of.size() == 1 ? "" : "each of ") +
        name_ranks(of) + " " + state;
  }
  return text;
}

// Names the first parameter that requires grad on some ranks only. A rank that waits elsewhere is
// left out: a pass notes the flags when it begins, and this rank may not have begun it.
std::string name_trainable(const Reports& reports, const std::vector<std::string>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    Ranks on;
    Ranks off;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank].elsewhere.empty() && i < reports[rank].trainable.size()) {
        (reports[rank].trainable[i] == '1' ? on : off).push_back(rank);
      }
    }
    if (!on.empty() && !off.empty()) {
      return "Parameter '" + params[i] + "' requires grad on " + name_ranks(on) + " and not on " +
          name_ranks(off) + ". requires_grad_() must change on all ranks alike. ";
    }
  }
  return "";
}

std::string name_agreed(const Reports& reports, int64_t number) {
  for (const RankReport& report : reports) {
    if (const LedgerEntry* entry = report.find(number - 1)) {
      return ". They agreed up to " + std::to_string(number - 1) + ", " + entry->what;
    }
  }
  return "";
}

// Says where to look for the fault, if all ranks have answered.
std::string hint(const Reports& reports, int64_t number, bool differ) {
  if (differ) {
    return "All ranks must call the same units in the same order: look for branches that depend on "
           "the data or the rank. ";
  }
  const auto is_outside = [number](const RankReport& each) { // waits in no known collective
    return each.answered && each.elsewhere.empty() && each.find(number) == nullptr;
  };
  if (any_waits_in(reports, number) && std::ranges::any_of(reports, is_outside)) {
    return "A collective of the program between a forward and its backward, such as the sum of a "
           "loss for the log, comes too early while ranks call other units: call it after the "
           "backward. ";
  }
  const auto is_alone = [&](const RankReport& each) {
    return each.elsewhere != reports.front().elsewhere;
  };
  if (std::ranges::any_of(reports, is_alone)) { // a function of the package was called
    return "All ranks must call the same functions in the same order: look for branches that "
           "depend on the rank. ";
  }
  return "";
}

} // namespace

// Drops each wait that a running thread of another rank may still end, until no more waits can be
// dropped. The remaining threads wait for each other.
bool wait_for_ever(const Reports& reports) {
  std::vector<std::pair<const RankReport*, const GroupPosition*>> waits;
  for (const RankReport& report : reports) {
    for (const GroupPosition& each : report.groups) {
      if (each.waiting >= 0) {
        waits.emplace_back(&report, &each);
      }
    }
  }
  for (size_t before = waits.size() + 1; waits.size() < before;) {
    before = waits.size();
    std::map<std::string, int64_t> next; // by group: the smallest `next` of a waiting thread
    std::map<std::pair<std::string, int64_t>, std::set<std::string>>
        issued; // collectives waited in
    for (const auto& [report, wait] : waits) {
      issued[{wait->name, wait->waiting}].insert(wait->what);
      for (const GroupPosition& each : report->groups) {
        if (each.thread == wait->thread) {
          int64_t& least = next.try_emplace(each.name, each.next).first->second;
          least = std::min(least, each.next);
        }
      }
    }
    std::erase_if(waits, [&](const auto& each) {
      const auto& [name, waiting] = std::pair(each.second->name, each.second->waiting);
      return next.at(name) > waiting && issued.at({name, waiting}).size() == 1;
    });
  }
  return !waits.empty();
}

std::string describe(
    const Reports& reports,
    const std::vector<std::string>& params,
    const std::string& model,
    const std::string& advice,
    const std::string& unreachable) {
  const int64_t difference = first_difference(reports);
  const bool differ = difference >= 0;
  const int64_t number = differ ? difference : stuck_in(reports);
  const bool is_in = differ || any_waits_in(reports, number);
  const std::string of = model.empty() ? "" : " of the model " + model;
  std::string text = is_in ? "collective " + std::to_string(number) + of + ": " : "";
  text += name_states(reports, number, unreachable.empty());
  text += (is_in ? name_agreed(reports, number) : "") + ". ";
  if (!unreachable.empty()) {
    text += "The other ranks could not be asked: " + unreachable + " did not answer. ";
  }
  const bool all_answered = std::ranges::all_of(reports, &RankReport::answered);
  text += name_trainable(reports, params);
  text += all_answered ? hint(reports, number, differ)
                       : "Look for the first error in the output of the other ranks. ";
  return text + advice;
}

} // namespace zerocore
