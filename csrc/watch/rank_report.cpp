// Reports of ranks: to text and back, and what a set of them means.
#include "watch/rank_report.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <utility>

namespace zerocore {

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
       {std::pair("waits ", "wait "), {"is ", "are "}, {"has ", "have "}, {"was ", "were "}}) {
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

const LedgerState* find_model(const RankReport& report, int64_t model) {
  const auto found = std::ranges::find(report.models, model, &LedgerState::id);
  return found == report.models.end() ? nullptr : &*found;
}

// -- who waits for ever ----------------------------------------------------------------------

// Whether another rank, which may be past it, has begun the collective that one waits in.
bool has_begun(const RankReport& other, const LedgerState& waiting) {
  const LedgerState* state = find_model(other, waiting.id);
  if (state == nullptr || state->next <= waiting.waiting) {
    return false;
  }
  const LedgerEntry* own = waiting.find(waiting.waiting);
  const LedgerEntry* entry = state->find(waiting.waiting);
  return own == nullptr || entry == nullptr || entry->is_same(*own);
}

bool has_begun(const RankReport& other, const NamedWait& wait) {
  return std::ranges::any_of(other.begun, [&](const NamedWait& begun) {
    return begun.what == wait.what && begun.count >= wait.count;
  });
}

// Whether one of the rank's waits can end; `moves`: which ranks may begin more than they have.
bool can_go_on(const Reports& reports, size_t rank, const std::vector<bool>& moves) {
  const auto ends = [&](const auto& begun_by) {
    for (size_t other = 0; other < reports.size(); ++other) {
      if (other != rank && !moves[other] && !begun_by(reports[other])) {
        return false;
      }
    }
    return true;
  };
  const RankReport& report = reports[rank];
  bool waits = false;
  for (const LedgerState& state : report.models) {
    if (state.waiting >= 0) {
      waits = true;
      if (ends([&](const RankReport& other) { return has_begun(other, state); })) {
        return true;
      }
    }
  }
  for (const NamedWait& wait : report.waits) {
    if (wait.decides) {
      waits = true;
      if (ends([&](const RankReport& other) { return has_begun(other, wait); })) {
        return true;
      }
    }
  }
  return !waits;
}

// -- the sentence ----------------------------------------------------------------------------

struct Subject { // a collective that the sentence is about
  int64_t model = 0;
  int64_t number = -1;
  bool differs = false; // between ranks
};

// The model's first collective that is not the same on all ranks that have come to it, or -1.
int64_t first_difference(const Reports& reports, int64_t model) {
  const LedgerState* longest = nullptr;
  for (const RankReport& report : reports) {
    const LedgerState* state = find_model(report, model);
    if (state != nullptr && (longest == nullptr || state->next > longest->next)) {
      longest = state;
    }
  }
  int64_t first = -1;
  for (const RankReport& report : reports) {
    if (const LedgerState* state = find_model(report, model)) {
      for (const LedgerEntry& entry : state->entries) {
        const LedgerEntry* other = longest->find(entry.number);
        if (other != nullptr && !entry.is_same(*other)) {
          first = first < 0 ? entry.number : std::min(first, entry.number);
          break;
        }
      }
    }
  }
  return first;
}

// The first collective that differs, or else the oldest that ranks wait in.
std::optional<Subject> find_subject(const Reports& reports, const ParamNames& params) {
  std::optional<Subject> oldest;
  for (const auto& [model, _] : params) {
    if (const int64_t number = first_difference(reports, model); number >= 0) {
      return Subject{model, number, true};
    }
    for (const RankReport& report : reports) {
      const LedgerState* state = find_model(report, model);
      if (state != nullptr && state->waiting >= 0 &&
          (!oldest || (oldest->model == model && state->waiting < oldest->number))) {
        oldest = Subject{model, state->waiting, false};
      }
    }
  }
  return oldest;
}

std::string name_wait(const RankReport& report, const LedgerState& state) {
  const LedgerEntry* entry = state.find(state.waiting);
  const std::string in = report.operation.empty() ? state.call : report.operation;
  return "waits in " + (entry == nullptr ? "a collective" : name_entry(*entry)) +
      (in.empty() ? "" : ", in " + in);
}

std::string position(const RankReport& report, const std::optional<Subject>& subject) {
  const LedgerState* own = subject ? find_model(report, subject->model) : nullptr;
  if (own != nullptr && own->waiting == subject->number) {
    return name_wait(report, *own);
  }
  for (const LedgerState& state : report.models) {
    if (state.waiting >= 0 && &state != own) {
      return name_wait(report, state) + " of the model " + state.model;
    }
  }
  if (!report.waits.empty()) {
    return "waits in " + report.waits.front().what;
  }
  const LedgerEntry* entry = own == nullptr ? nullptr : own->find(subject->number);
  if (entry != nullptr) {
    return (entry->done ? "is through " : "has issued ") + name_entry(*entry);
  }
  return "has not come to it (in " +
      (report.operation.empty() ? "no collective of this model" : report.operation) + ")";
}

std::string name_trainable(const Reports& reports, const ParamNames& params) {
  constexpr size_t kNamed = 3;
  std::string text;
  size_t count = 0;
  for (const auto& [model, names] : params) {
    for (size_t i = 0; i < names.size(); ++i) {
      Ranks on;
      Ranks off;
      for (size_t rank = 0; rank < reports.size(); ++rank) {
        const LedgerState* state = find_model(reports[rank], model);
        if (state != nullptr && i < state->trainable.size()) {
          (state->trainable[i] == '1' ? on : off).push_back(rank);
        }
      }
      if (!on.empty() && !off.empty() && ++count <= kNamed) {
        text += "Parameter '" + names[i] + "' requires grad on " + name_ranks(on) + " and not on " +
            name_ranks(off) + ". ";
      }
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
    if (report.state == RankState::Ended) {
      add(statements,
          report.error.empty() ? "has ended its program or its process group, without an error"
                               : "ended the program after " + report.error,
          rank);
    } else if (report.state == RankState::Silent) {
      add(statements,
          "did not answer within 4 s (killed or stopped, out of reach, or on a machine that is too "
          "busy)",
          rank);
    }
  }
  return statements.empty() ? "" : "Of the others " + join(statements) + ". ";
}

std::string name_agreed(const Reports& reports, const Subject& subject) {
  for (const RankReport& report : reports) {
    const LedgerState* state = find_model(report, subject.model);
    if (const LedgerEntry* entry = state ? state->find(subject.number - 1) : nullptr) {
      return ". They agreed up to " + std::to_string(subject.number - 1) + ", " +
          name_entry(*entry);
    }
  }
  return "";
}

// What to do about ranks that all answered.
std::string advice_on(
    const Reports& reports,
    const std::optional<Subject>& subject,
    const std::string& advice) {
  const auto has_begun_subject = [&](const RankReport& report) {
    const LedgerState* state = find_model(report, subject->model);
    return state != nullptr && state->next > subject->number;
  };
  if (subject && subject->differs) {
    return "All ranks must call the same units in the same order: look for branches that depend on "
           "the data or the rank. ";
  }
  if (is_deadlock(reports)) {
    return "They wait for each other. All ranks must make the same calls of each model (also to "
           "evaluate), saves and loads, in the same order: look for `if rank == 0`. ";
  }
  if (subject && !std::ranges::all_of(reports, has_begun_subject)) {
    return "A collective of the program between a forward and its backward, such as the sum of a "
           "loss for the log, comes too early while ranks call other units: call it behind the "
           "backward. " +
        advice;
  }
  return advice;
}

} // namespace

std::string RankReport::encode() const {
  std::ostringstream out;
  out << static_cast<int>(state) << ' ' << models.size() << ' ' << waits.size() << ' '
      << begun.size() << '\n'
      << error << '\n'
      << operation << '\n';
  for (const LedgerState& each : models) {
    out << each.id << ' ' << each.next << ' ' << each.waiting << ' ' << each.entries.size() << ' '
        << each.model << '\n'
        << each.call << '\n'
        << each.trainable << '\n';
    for (const LedgerEntry& entry : each.entries) {
      out << entry.number << ' ' << entry.nbytes << ' ' << entry.done << ' ' << entry.op << ' '
          << entry.unit << '\n';
    }
  }
  for (const auto* list : {&waits, &begun}) {
    for (const NamedWait& wait : *list) {
      out << wait.count << ' ' << wait.decides << ' ' << wait.what << '\n';
    }
  }
  return out.str();
}

RankReport RankReport::decode(std::istream& in) {
  RankReport report;
  int state = 0;
  size_t num_models = 0;
  size_t num_waits = 0;
  size_t num_begun = 0;
  in >> state >> num_models >> num_waits >> num_begun;
  report.state = static_cast<RankState>(state);
  report.models.resize(num_models);
  report.waits.resize(num_waits);
  report.begun.resize(num_begun);
  std::getline(in.ignore(), report.error);
  std::getline(in, report.operation);
  for (LedgerState& each : report.models) {
    size_t num_entries = 0;
    in >> each.id >> each.next >> each.waiting >> num_entries;
    std::getline(in.ignore(), each.model);
    std::getline(in, each.call);
    std::getline(in, each.trainable);
    each.entries.resize(num_entries);
    for (LedgerEntry& entry : each.entries) {
      in >> entry.number >> entry.nbytes >> entry.done >> entry.op;
      std::getline(in.ignore(), entry.unit);
    }
  }
  for (auto* list : {&report.waits, &report.begun}) {
    for (NamedWait& wait : *list) {
      in >> wait.count >> wait.decides;
      std::getline(in.ignore(), wait.what);
    }
  }
  return report;
}

bool is_deadlock(const Reports& reports) {
  std::vector<bool> moves(reports.size());
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      const RankReport& report = reports[rank];
      const bool ended = report.state == RankState::Ended;
      if (!moves[rank] && !ended && (!report.answered() || can_go_on(reports, rank, moves))) {
        moves[rank] = changed = true;
      }
    }
  }
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!moves[rank] && reports[rank].answered()) {
      return true;
    }
  }
  return false;
}

std::string describe(
    const Reports& reports,
    const ParamNames& params,
    const std::string& advice,
    const std::string& unreachable) {
  const std::string silent = unreachable.empty()
      ? name_silent(reports)
      : "The other ranks could not be asked: " + unreachable + " did not answer. ";
  const std::optional<Subject> subject = find_subject(reports, params);
  Statements statements;
  std::string model;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].answered()) {
      add(statements, position(reports[rank], subject), rank);
    }
    const LedgerState* state = subject ? find_model(reports[rank], subject->model) : nullptr;
    model = state == nullptr ? model : state->model;
  }
  std::string text;
  if (subject) {
    text = "collective " + std::to_string(subject->number) + " of the model " + model + ": ";
  }
  text += join(statements) + (subject ? name_agreed(reports, *subject) : "") + ". " + silent +
      name_trainable(reports, params);
  return text +
      (silent.empty() ? advice_on(reports, subject, advice)
                      : "Look for the first error in the output of the other ranks. ");
}

} // namespace zerocore
