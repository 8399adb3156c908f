// The ring of a rank's last collectives, and the sentence about those of all ranks.
#include "watch/ledger.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

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

LedgerState Ledger::state() const {
  const std::lock_guard lock(mutex_);
  LedgerState state;
  state.waiting = waiting_.load(std::memory_order_relaxed);
  state.trainable = trainable_;
  const int64_t next = next_.load(std::memory_order_acquire);
  for (int64_t number = std::max(oldest_, next - static_cast<int64_t>(kKept)); number < next;
       ++number) {
    const Slot& slot = slots_[number % kKept];
    state.entries.push_back(
        {number, slot.op.load(), *slot.unit.load(), slot.nbytes.load(), slot.done.load()});
  }
  return state;
}

ModelPosition Ledger::position(const std::string& name) const {
  const int64_t waiting = waiting_.load(std::memory_order_relaxed);
  return {name, next_.load(std::memory_order_acquire), waiting};
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

namespace {

using Ranks = std::vector<size_t>;
using Reports = std::vector<RankReport>;
// Sentences and the ranks that each is about, in order of the first rank.
using Statements = std::vector<std::pair<std::string, Ranks>>;

constexpr size_t kNamedRanks = 8;

void add(Statements& statements, const std::string& what, size_t rank) {
  const auto same = std::ranges::find(statements, what, &Statements::value_type::first);
  if (same == statements.end()) {
    statements.push_back({what, {rank}});
  } else {
    same->second.push_back(rank);
  }
}

std::string name_ranks(const Ranks& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kNamedRanks); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kNamedRanks) {
    text += " and " + std::to_string(ranks.size() - kNamedRanks) + " more";
  }
  return text;
}

// The statement with its verb for several ranks.
std::string plural(const std::string& what) {
  for (const auto& [one, many] :
       {std::pair("waits ", "wait "), {"is ", "are "}, {"has ", "have "}}) {
    if (what.rfind(one, 0) == 0) {
      return many + what.substr(std::string(one).size());
    }
  }
  return what;
}

std::string join(const Statements& statements) {
  std::string text;
  for (const auto& [what, ranks] : statements) {
    text += (text.empty() ? "" : "; ") + name_ranks(ranks) + " ";
    text += ranks.size() == 1 ? what : plural(what);
  }
  return text;
}

std::string name_entry(const LedgerEntry& entry) {
  constexpr const char* kUnits[] = {"bytes", "kB", "MB", "GB"};
  auto size = static_cast<double>(entry.nbytes);
  int unit = 0;
  while (size >= 1000 && unit < 3) {
    size /= 1000;
    ++unit;
  }
  char number[32];
  std::snprintf(number, sizeof(number), unit == 0 ? "%.0f %s" : "%.1f %s", size, kUnits[unit]);
  return entry.op + " of '" + entry.unit + "' (" + number + ")";
}

const LedgerEntry* find(const RankReport& report, int64_t number) {
  const auto& entries = report.ledger.entries;
  const auto found = std::ranges::find(entries, number, &LedgerEntry::number);
  return found == entries.end() ? nullptr : &*found;
}

int64_t next_number(const RankReport& report) {
  return report.ledger.entries.empty() ? 0 : report.ledger.entries.back().number + 1;
}

// The first collective that is not the same on all ranks that have come to it, or -1.
int64_t first_difference(const Reports& reports) {
  int64_t first = -1;
  const RankReport* longest = nullptr;
  for (const RankReport& report : reports) {
    if (report.answered && (!longest || next_number(report) > next_number(*longest))) {
      longest = &report;
    }
  }
  for (const RankReport& report : reports) {
    for (const LedgerEntry& entry : report.ledger.entries) {
      const LedgerEntry* other = find(*longest, entry.number);
      if (report.answered && other && !entry.is_same(*other)) {
        first = first < 0 ? entry.number : std::min(first, entry.number);
        break;
      }
    }
  }
  return first;
}

// The collective that ranks wait in: the oldest, or the newest that was issued if none waits.
int64_t stuck_in(const Reports& reports) {
  int64_t oldest = -1;
  int64_t newest = 0;
  for (const RankReport& report : reports) {
    const int64_t waiting = report.ledger.waiting;
    if (report.answered && waiting >= 0 && (oldest < 0 || waiting < oldest)) {
      oldest = waiting;
    }
    newest = std::max(newest, next_number(report) - 1);
  }
  return oldest < 0 ? newest : oldest;
}

const ModelPosition* find_model(const RankReport& report, const std::string& name) {
  const auto found = std::ranges::find(report.models, name, &ModelPosition::name);
  return found == report.models.end() ? nullptr : &*found;
}

// Whether the rank waits in a collective that another one has not issued.
bool waits_for_another(const RankReport& report, const Reports& reports) {
  return std::ranges::any_of(report.models, [&](const ModelPosition& own) {
    return own.waiting >= 0 && std::ranges::any_of(reports, [&](const RankReport& other) {
             const ModelPosition* same = find_model(other, own.name);
             return same != nullptr && same->next <= own.waiting;
           });
  });
}

bool waits_in(const Reports& reports, int64_t number) {
  return std::any_of(reports.begin(), reports.end(), [&](const RankReport& report) {
    return report.answered && report.ledger.waiting == number;
  });
}

std::string position(const RankReport& report, int64_t number) {
  const LedgerEntry* entry = find(report, number);
  if (entry != nullptr && report.ledger.waiting == number) {
    return "waits in " + name_entry(*entry);
  }
  if (!report.elsewhere.empty()) {
    return "waits in " + report.elsewhere;
  }
  if (entry != nullptr) {
    return (entry->done ? "is through " : "has issued ") + name_entry(*entry);
  }
  return "has not come to it (in no collective of this model)";
}

// Whether a rank that answers waits in nothing that is known, while others wait for it.
bool any_outside(const Reports& reports, int64_t number) {
  return waits_in(reports, number) &&
      std::ranges::any_of(reports, [number](const RankReport& report) {
           return report.answered && report.elsewhere.empty() && find(report, number) == nullptr;
         });
}

std::string name_trainable(const Reports& reports, const std::vector<std::string>& params) {
  constexpr size_t kNamed = 3;
  std::string text;
  size_t count = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Ranks on;
    Ranks off;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank].answered && i < reports[rank].ledger.trainable.size()) {
        (reports[rank].ledger.trainable[i] == '1' ? on : off).push_back(rank);
      }
    }
    if (!on.empty() && !off.empty() && ++count <= kNamed) {
      text += "Parameter '" + params[i] + "' requires grad on " + name_ranks(on) + " and not on " +
          name_ranks(off) + ". ";
    }
  }
  if (count > kNamed) {
    text += "Others differ, too: " + std::to_string(count - kNamed) + " more. ";
  }
  return count == 0 ? text : text + "requires_grad_() must change on all ranks alike. ";
}

std::string name_silent(const Reports& reports) {
  Statements statements;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const RankReport& report = reports[rank];
    if (report.ended) {
      const bool is_early = report.ended->empty();
      add(statements,
          is_early ? "ended the program without an error, maybe after fewer steps"
                   : "ended the program" + *report.ended,
          rank);
    } else if (!report.answered) {
      add(statements,
          "did not answer within 3 s: killed, stopped, out of reach, or on a machine that is too "
          "busy",
          rank);
    }
  }
  return statements.empty() ? "" : "Of the others " + join(statements) + ". ";
}

std::string name_agreed(const Reports& reports, int64_t number) {
  for (const RankReport& report : reports) {
    if (const LedgerEntry* entry = find(report, number - 1)) {
      return ". They agreed up to " + std::to_string(number - 1) + ", " + name_entry(*entry);
    }
  }
  return "";
}

} // namespace

std::string RankReport::encode() const {
  std::ostringstream out;
  out << ledger.waiting << '\n' << ledger.trainable << '\n' << elsewhere << '\n';
  out << models.size() << '\n';
  for (const ModelPosition& each : models) {
    out << each.next << ' ' << each.waiting << ' ' << each.name << '\n';
  }
  for (const LedgerEntry& entry : ledger.entries) {
    out << entry.number << ' ' << entry.nbytes << ' ' << entry.done << ' ' << entry.op << ' '
        << entry.unit << '\n';
  }
  return out.str();
}

RankReport RankReport::decode(const std::string& text) {
  RankReport report;
  report.answered = true;
  std::istringstream in(text);
  std::string line;
  std::getline(in, line);
  report.ledger.waiting = std::stoll(line);
  std::getline(in, report.ledger.trainable);
  std::getline(in, report.elsewhere);
  std::getline(in, line);
  report.models.resize(std::stoul(line));
  for (ModelPosition& each : report.models) {
    in >> each.next >> each.waiting;
    std::getline(in.ignore(), each.name);
  }
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    LedgerEntry entry;
    fields >> entry.number >> entry.nbytes >> entry.done >> entry.op;
    std::getline(fields >> std::ws, entry.unit);
    report.ledger.entries.push_back(std::move(entry));
  }
  return report;
}

bool wait_for_ever(const Reports& reports) {
  const auto waits = [](const RankReport& report) {
    return report.answered && std::ranges::any_of(report.models, [](const ModelPosition& each) {
             return each.waiting >= 0;
           });
  };
  return std::ranges::all_of(reports, waits) &&
      (first_difference(reports) >= 0 || std::ranges::all_of(reports, [&](const auto& report) {
           return waits_for_another(report, reports);
         }));
}

std::string describe(
    const Reports& reports,
    const std::vector<std::string>& params,
    const std::string& model,
    const std::string& advice,
    const std::string& unreachable) {
  const std::string silent = unreachable.empty()
      ? name_silent(reports)
      : "The other ranks could not be asked: " + unreachable + " did not answer. ";
  const int64_t difference = first_difference(reports);
  const int64_t number = difference >= 0 ? difference : stuck_in(reports);
  Statements statements;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].answered) {
      add(statements, position(reports[rank], number), rank);
    }
  }
  const bool is_in = difference >= 0 || waits_in(reports, number);
  const std::string of = model.empty() ? "" : " of the model " + model;
  std::string text = is_in ? "collective " + std::to_string(number) + of + ": " : "";
  text += join(statements) + (is_in ? name_agreed(reports, number) : "") + ". " + silent +
      name_trainable(reports, params);
  if (!silent.empty()) {
    text += "Look for the first error in the output of the other ranks. ";
  } else if (difference < 0 && any_outside(reports, number)) {
    text +=
        "A collective of the program between a forward and its backward, such as the sum of a loss "
        "for the log, comes too early while ranks call other units: call it behind the backward. ";
  } else if (difference >= 0) {
    text +=
        "All ranks must call the same units in the same order: look for branches that depend on "
        "the data or the rank. ";
  }
  return text + advice;
}

} // namespace zerocore
