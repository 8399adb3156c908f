// Control messages between the ranks of a model.
#include "runtime/control_channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace zerocore {

namespace {

const std::string kCalls = "the calls of a pass";
const std::string kUsed = "the parameters that a backward used";
// A message is the largest of what the ranks say: a unit so that the first one wins and then the
// fewest writes to it, or 0.
constexpr int64_t kFirstUnit = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostWrites = std::numeric_limits<int32_t>::max();
enum Field : uint8_t { Wanted, Changed, Skipped, Failed, MostGathered, LeastGathered, kNumFields };

at::Tensor to_bytes(const std::vector<bool>& flags) {
  at::Tensor values = at::empty({static_cast<int64_t>(flags.size())}, at::kByte);
  std::copy(flags.begin(), flags.end(), values.mutable_data_ptr<uint8_t>());
  return values;
}

std::vector<bool> to_flags(const at::Tensor& values) {
  const auto* bytes = values.const_data_ptr<uint8_t>();
  return std::vector<bool>(bytes, bytes + values.numel());
}

// One number a call: 0 for one that the rank did not make.
int32_t encode(const PassCall& call) {
  return call.made ? 1 + 4 * call.last + (call.reads ? 2 : 0) + (call.needs_backward ? 1 : 0) : 0;
}

void decode(int32_t code, PassCall& call) {
  call.made = code > 0;
  if (call.made) {
    call.last = (code - 1) / 4;
    call.reads = (code - 1) / 2 % 2 != 0;
    call.needs_backward = (code - 1) % 2 != 0;
  }
}

} // namespace

ControlChannel::ControlChannel(c10::intrusive_ptr<c10d::ProcessGroup> control, Alarm* alarm)
    : streams_(c10::Device(c10::DeviceType::CPU)),
      collectives_(std::move(control), streams_, alarm),
      message_(at::zeros({kNumFields}, at::kLong)) {}

void ControlChannel::say(const Answer& own) {
  auto* fields = message_.mutable_data_ptr<int64_t>();
  fields[Wanted] =
      own.wanted ? (kFirstUnit - *own.wanted) * kMostWrites + kMostWrites - 1 - own.num_writes : 0;
  fields[Changed] = own.changed ? 1 : 0;
  fields[Skipped] = own.skipped ? 1 : 0;
  fields[Failed] = own.failed ? 1 + *own.failed : 0;
  fields[MostGathered] = own.gathered;
  fields[LeastGathered] = -own.gathered;
  round_ = collectives_.all_reduce(message_, {&kCalls, nullptr}, c10d::ReduceOp::MAX);
}

ControlChannel::Answer ControlChannel::wait() {
  round_.wait(streams_);
  const auto* fields = message_.const_data_ptr<int64_t>();
  Answer answer;
  answer.changed = fields[Changed] != 0;
  answer.skipped = fields[Skipped] != 0;
  if (fields[Failed] != 0) {
    answer.failed = static_cast<int>(fields[Failed] - 1);
  }
  if (fields[Wanted] != 0) {
    answer.wanted = static_cast<UnitId>(kFirstUnit - fields[Wanted] / kMostWrites);
    answer.num_writes = static_cast<int>(kMostWrites - 1 - fields[Wanted] % kMostWrites);
  }
  answer.gathers_differ = fields[MostGathered] != -fields[LeastGathered];
  return answer;
}

std::vector<PassCalls> ControlChannel::gather(const PassCalls& own) {
  const auto numel = static_cast<int64_t>(own.size());
  const at::Tensor all = at::zeros({std::max<int64_t>(1, collectives_.size() * numel)}, at::kInt);
  auto* codes = all.mutable_data_ptr<int32_t>();
  std::transform(own.begin(), own.end(), codes + collectives_.rank() * numel, encode);
  collectives_.all_reduce(all, {&kCalls, nullptr}).wait(streams_);
  std::vector<PassCalls> result(collectives_.size(), own);
  for (PassCalls& calls : result) {
    for (PassCall& call : calls) {
      decode(*codes++, call);
    }
  }
  return result;
}

std::vector<bool> ControlChannel::any_rank(const std::vector<bool>& flags) {
  return any_rank(flags, kCalls);
}

std::vector<bool> ControlChannel::any_rank(
    const std::vector<bool>& flags,
    const std::string& what) {
  const at::Tensor values = to_bytes(flags);
  collectives_.all_reduce(values, {&what, nullptr}, c10d::ReduceOp::MAX).wait(streams_);
  return to_flags(values);
}

// Waits for the message before, which has long arrived, for the ledger's sake.
void ControlChannel::tell_used(const std::vector<bool>& flags) {
  telling_.wait(streams_);
  used_ = to_bytes(flags);
  telling_ = collectives_.all_reduce(used_, {&kUsed, nullptr}, c10d::ReduceOp::MAX);
}

std::vector<bool> ControlChannel::hear_used() {
  telling_.wait(streams_);
  return to_flags(used_);
}

} // namespace zerocore
