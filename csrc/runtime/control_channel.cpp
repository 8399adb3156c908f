// Control messages between the ranks of a model.
#include "runtime/control_channel.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>

#include "runtime/collectives.h"
#include "watch/alarm.h"
#include "watch/roll_call.h"

namespace zerocore {

namespace {

const std::string kCalls = "the calls of a pass";
const std::string kOptimizerFlags = "optimizer";
const std::string kUsed = "the parameters that a backward used";
// A message is the largest of what the ranks say: a unit so that the first one wins, or 0.
constexpr int64_t kFirstUnit = std::numeric_limits<int32_t>::max();
constexpr size_t kMostKnown = 4096; // see Note [Static graphs]
enum Field : uint8_t {
  Wanted,
  Changed,
  Skipped,
  Failed,
  Reads,
  MostGathered,
  LeastGathered,
  MostWritten,
  LeastWritten,
  NumAdded,
  kNumFields
};

std::shared_ptr<ControlLink> link_of(const c10::intrusive_ptr<c10d::ProcessGroup>& control) {
  return ControlLink::of(control->getBackend(c10::DeviceType::CPU), /*is_alone=*/true);
}

const std::string& name_of(MessageKind flags) {
  return flags == MessageKind::UsedFlags     ? kUsed
      : flags == MessageKind::OptimizerFlags ? kOptimizerFlags
                                             : kCalls;
}

// One number a call: 0 for one that the rank did not make.
int64_t encode(const PassCall& call) {
  return call.made ? 1 + 2 * int64_t{call.last} + (call.needs_backward ? 1 : 0) : 0;
}

void decode(int64_t code, PassCall& call) {
  call.made = code > 0;
  if (call.made) {
    call.last = static_cast<int32_t>((code - 1) / 2);
    call.needs_backward = (code - 1) % 2 != 0;
  }
}

} // namespace

ControlChannel::ControlChannel(
    const c10::intrusive_ptr<c10d::ProcessGroup>& control,
    Alarm* alarm,
    bool is_static)
    : link_(link_of(control)),
      rank_(control->getRank()),
      size_(control->getSize()),
      user_(link_->add_user()),
      is_static_(is_static),
      alarm_(alarm) {}

ControlChannel::Pending ControlChannel::begin(ControlMessage own, const std::string& what) {
  Pending pending{nullptr, -1, &what};
  ++num_messages_;
  own.user = user_;
  if (alarm_ != nullptr) {
    alarm_->check();
    const auto nbytes = own.width * static_cast<int64_t>(sizeof(int64_t));
    pending.number = alarm_->ledger().begin("all_reduce", what, nbytes);
  }
  try {
    pending.round = link_->begin(std::move(own));
  } catch (const std::exception& error) {
    fail_collective("all_reduce", what, error, alarm_);
  }
  return pending;
}

ControlMessage ControlChannel::wait(Pending& pending) {
  const ControlLink::Ticket round = std::exchange(pending.round, nullptr);
  TORCH_INTERNAL_ASSERT(round != nullptr, "waits for a message that was not sent");
  if (alarm_ != nullptr) {
    alarm_->ledger().begin_wait(pending.number);
  }
  try {
    ControlMessage heard = link_->wait(round);
    if (alarm_ != nullptr) {
      alarm_->ledger().finish(pending.number);
    }
    return heard;
  } catch (const std::exception& error) {
    fail_collective("all_reduce", *pending.what, error, alarm_);
  }
}

void ControlChannel::begin_backward(const std::shared_ptr<void>& running) {
  try {
    link_->begin_backward(running);
  } catch (const c10::Error& error) {
    if (alarm_ != nullptr) {
      alarm_->note_failure(error.what_without_backtrace());
    }
    throw; // at once: autograd reports the first error, and the alarm ends waits with others
  }
}

void ControlChannel::say(const Answer& own) {
  std::vector<int64_t> fields(kNumFields);
  fields[Wanted] = own.wanted ? kFirstUnit - *own.wanted : 0;
  fields[Changed] = own.changed ? 1 : 0;
  fields[Skipped] = own.skipped ? 1 : 0;
  fields[Failed] = own.failed ? 1 + *own.failed : 0;
  fields[Reads] = own.reads ? 1 : 0;
  fields[MostGathered] = own.gathered;
  fields[LeastGathered] = -own.gathered;
  fields[MostWritten] = own.written;
  fields[LeastWritten] = -own.written;
  fields[NumAdded] = own.num_added;
  round_ = begin(ControlMessage::of(MessageKind::Pass, std::move(fields)), kCalls);
}

ControlChannel::Answer ControlChannel::wait() {
  const std::vector<int64_t> fields = wait(round_).words;
  Answer answer;
  answer.changed = fields[Changed] != 0;
  answer.skipped = fields[Skipped] != 0;
  answer.reads = fields[Reads] != 0;
  if (fields[Failed] != 0) {
    answer.failed = static_cast<int>(fields[Failed] - 1);
  }
  if (fields[Wanted] != 0) {
    answer.wanted = static_cast<UnitId>(kFirstUnit - fields[Wanted]);
  }
  answer.num_added = fields[NumAdded];
  answer.gathers_differ = fields[MostGathered] != -fields[LeastGathered];
  answer.writes_differ = fields[MostWritten] != -fields[LeastWritten];
  return answer;
}

std::vector<bool> ControlChannel::differing(
    const std::vector<int64_t>& sharers,
    const std::vector<int64_t>& numbers) {
  std::vector<int64_t> words = {rank_};
  words.insert(words.end(), sharers.begin(), sharers.end());
  words.insert(words.end(), numbers.begin(), numbers.end());
  Pending pending = begin(ControlMessage::of(MessageKind::Calls, std::move(words)), kCalls);
  const ControlMessage heard = wait(pending);
  std::vector<bool> differ(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    std::map<int64_t, int64_t> known; // by sharers
    for (size_t list = 1; list < heard.words.size(); list += heard.width) {
      const int64_t number = heard.words[list + numbers.size() + i];
      const auto [first, _] = known.try_emplace(heard.words[list + i], number);
      differ[i] = differ[i] || first->second != number;
    }
  }
  return differ;
}

RankCalls ControlChannel::gather(const PassCalls& own, size_t num_slots, int64_t num_added) {
  const size_t num_known = own.size() - num_slots;
  std::vector<int64_t> words = {rank_};
  for (size_t i = 0; i < own.size(); ++i) {
    if (i >= num_known && own[i].made) {
      words.push_back(static_cast<int64_t>(i));
    }
    if (i < num_known || own[i].made) {
      words.push_back(encode(own[i]));
    }
  }
  words.resize(1 + num_known + 2 * num_added); // zeros: no slot is the first call
  const std::vector<int64_t> codes(words.begin() + 1, words.end());
  Pending pending = begin(ControlMessage::of(MessageKind::Calls, std::move(words)), kCalls);
  const ControlMessage heard = wait(pending);
  RankCalls result;
  for (auto list = heard.words.begin(); list != heard.words.end(); list += heard.width) {
    if (std::equal(codes.begin(), codes.end(), list + 1)) {
      result.own = static_cast<int>(result.lists.size());
    }
    PassCalls& calls = result.lists.emplace_back(own);
    for (PassCall& call : calls) {
      call.made = false;
    }
    const auto codes_of = [&](size_t word) { return list[static_cast<std::ptrdiff_t>(word) + 1]; };
    for (size_t i = 0; i < num_known; ++i) {
      decode(codes_of(i), calls[i]);
    }
    for (size_t i = num_known; i + 1 < codes.size() && codes_of(i) != 0; i += 2) {
      decode(codes_of(i + 1), calls.at(codes_of(i)));
    }
  }
  return result;
}

std::vector<bool> ControlChannel::any_rank(const std::vector<bool>& flags, MessageKind kind) {
  Flags told = tell(kind, flags);
  return hear(told);
}

// Waits for the message before, which has long arrived, for the ledger's sake.
void ControlChannel::tell_used(const std::vector<bool>& flags) {
  if (used_.pending.round != nullptr) {
    hear(used_);
  }
  used_ = tell(MessageKind::UsedFlags, flags);
}

std::vector<bool> ControlChannel::hear_used() {
  return hear(used_);
}

ControlChannel::Flags ControlChannel::tell(MessageKind kind, const std::vector<bool>& own) {
  Flags flags{kind, own, {}};
  if (!known_.contains({kind, own})) {
    flags.pending = begin(ControlMessage::of_flags(kind, own), name_of(kind));
  }
  return flags;
}

std::vector<bool> ControlChannel::hear(Flags& flags) {
  if (flags.pending.round == nullptr) {
    return known_.at({flags.kind, flags.own});
  }
  std::vector<bool> heard = wait(flags.pending).flags(flags.own.size());
  if (is_static_) {
    if (known_.size() >= kMostKnown) {
      known_.clear(); // on all ranks at once
    }
    known_[{flags.kind, flags.own}] = heard;
  }
  return heard;
}

void connect_peers(const std::string& control) {
  const auto group = c10d::resolve_process_group(control);
  RollCall::note_holder(group->getStore(), group->getRank());
  const auto link = link_of(group);
  link->wait(link->begin({}));
}

} // namespace zerocore
