// Encodes messages so that the maximum over the ranks is the answer.
#include "comm/control_channel.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>

#include "watch/alarm.h"

namespace zerocore {

namespace {

const std::string kCalls = "the calls of a pass";
const std::string kOptimizerFlags = "optimizer";
const std::string kUsed = "the parameters that a backward used";
// The ranks take the maximum of each field. A wanted unit is encoded so that the first unit wins;
// 0: no unit.
constexpr int64_t kFirstUnit = std::numeric_limits<int32_t>::max();
constexpr size_t kMostKnown = 4096; // see Note [Static graphs]
enum Field : uint8_t {
  Wanted,
  Failed,
  Reads,
  MostGathered,
  LeastGathered,
  MostWritten,
  LeastWritten,
  LargestCalls,
  SmallestCalls,
  kNumFields
};
static_assert(kNumFields == kPassNumbers);

std::shared_ptr<ControlLink> link_of(const c10::intrusive_ptr<c10d::ProcessGroup>& control) {
  return ControlLink::of(control->getBackend(c10::DeviceType::CPU), /*is_alone=*/true);
}

const std::string& name_of(MessageKind flags) {
  return flags == MessageKind::UsedFlags     ? kUsed
      : flags == MessageKind::OptimizerFlags ? kOptimizerFlags
                                             : kCalls;
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
      alarm_(alarm),
      group_(alarm == nullptr ? nullptr : alarm->in_ledger(*control)) {}

ControlChannel::Pending ControlChannel::begin(ControlMessage own, const std::string& what) {
  ++num_messages_;
  own.user = user_;
  const auto nbytes = own.width * static_cast<int64_t>(sizeof(int64_t));
  Pending pending{WatchedCollective(alarm_, group_, "all_reduce", what, nbytes)};
  pending.watched.run([&] { pending.round = link_->begin(std::move(own)); });
  return pending;
}

ControlMessage ControlChannel::wait(Pending& pending) {
  const ControlLink::Ticket round = std::exchange(pending.round, nullptr);
  TORCH_INTERNAL_ASSERT(round != nullptr, "wait() for a message that this rank did not send");
  ControlMessage heard;
  pending.watched.wait([&] { heard = link_->wait(round); });
  return heard;
}

void ControlChannel::begin_backward(const std::shared_ptr<void>& running) {
  try {
    link_->begin_backward(running);
  } catch (const c10::Error& error) {
    if (alarm_ != nullptr) {
      alarm_->note_failure(error.what_without_backtrace());
    }
    throw; // autograd reports the first error; the alarm ends the other waits
  }
}

void ControlChannel::say(const Answer& own) {
  std::vector<int64_t> fields(kNumFields);
  fields[Wanted] = own.wanted ? kFirstUnit - *own.wanted : 0;
  fields[Failed] = own.failed ? 1 + *own.failed : 0;
  fields[Reads] = own.reads ? 1 : 0;
  fields[MostGathered] = own.gathered;
  fields[LeastGathered] = -own.gathered;
  fields[MostWritten] = own.written;
  fields[LeastWritten] = -own.written;
  fields[LargestCalls] = static_cast<int64_t>(own.calls >> 1);
  fields[SmallestCalls] = -fields[LargestCalls];
  ControlMessage message = ControlMessage::of(MessageKind::Pass, std::move(fields));
  std::vector<bool> flags = own.needs;
  flags.insert(flags.end(), own.open.begin(), own.open.end());
  message.add_flags(flags);
  num_needs_ = own.needs.size();
  round_ = begin(std::move(message), kCalls);
}

ControlChannel::Answer ControlChannel::wait() {
  const ControlMessage heard = wait(round_);
  const std::vector<int64_t>& fields = heard.words;
  Answer answer;
  answer.calls_differ = fields[LargestCalls] != -fields[SmallestCalls];
  const std::vector<bool> flags = heard.flags(2 * num_needs_, kNumFields);
  const auto half = flags.begin() + static_cast<std::ptrdiff_t>(num_needs_);
  answer.needs.assign(flags.begin(), half);
  answer.open.assign(half, flags.end());
  answer.reads = fields[Reads] != 0;
  if (fields[Failed] != 0) {
    answer.failed = static_cast<int>(fields[Failed] - 1);
  }
  if (fields[Wanted] != 0) {
    answer.wanted = static_cast<UnitId>(kFirstUnit - fields[Wanted]);
  }
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
  Pending pending = begin(ControlMessage::of(MessageKind::Lists, std::move(words)), kCalls);
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

std::vector<bool> ControlChannel::any_rank(const std::vector<bool>& flags, MessageKind kind) {
  Flags told = tell(kind, flags);
  return hear(told);
}

// First ends the previous message, which has arrived: the ledger needs its end.
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
      known_.clear(); // all ranks do so at the same message
    }
    known_[{flags.kind, flags.own}] = heard;
  }
  return heard;
}

void connect_peers(const std::string& control) {
  const auto link = link_of(c10d::resolve_process_group(control));
  link->wait(link->begin({}));
}

} // namespace zerocore
