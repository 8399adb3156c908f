// Collectives over a c10d backend.
#include "runtime/collectives.h"

#include <c10/util/Exception.h>

#include <iterator>
#include <string_view>
#include <utility>

#include "common/error_text.h"
#include "common/math.h"
#include "runtime/wire_calls.h"
#include "watch/alarm.h"
#include "watch/control_link.h"

namespace zerocore {

namespace {

// The sum comes into the first part; the others count as zero.
c10::intrusive_ptr<c10d::Work> reduce_by(
    const OwnCollective& reduce,
    const at::Tensor& received,
    const at::Tensor& full,
    int64_t num_ranks) {
  const int64_t numel = full.numel() / num_ranks;
  if (received.numel() > numel) {
    received.narrow(0, numel, received.numel() - numel).zero_();
  }
  return reduce(received.narrow(0, 0, numel), full);
}

} // namespace

void fail_collective(
    const char* op,
    const std::string& unit,
    const std::exception& error,
    Alarm* alarm) {
  const std::string what = c10::str(op, " of ", unit, " failed: ", message_of(error));
  if (alarm != nullptr) {
    alarm->fail(what);
  }
  TORCH_CHECK_WITH(
      DistBackendError, false, what, ". Did a rank stop, or call other units than this one?");
}

void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams) {
  for (auto pending = collectives.rbegin(); pending != collectives.rend(); ++pending) {
    pending->wait(streams);
  }
  collectives.clear();
}

void PendingCollective::wait(const Streams& streams) {
  if (op_ == nullptr) { // it was waited for
    return;
  }
  const char* op = std::exchange(op_, nullptr);
  const int64_t begin = record_ ? now_ns() : 0;
  try {
    if (done_ == nullptr) {
      wait_on_host();
    } else {
      wait_on_device(streams);
    }
  } catch (const std::exception& error) {
    fail(op, error);
  }
  if (record_) {
    record_->wait_ns += now_ns() - begin; // a device's events replace it
  }
  works_.clear();
  keep_alive_.clear();
  record_.reset();
}

void PendingCollective::wait_on_host() const {
  if (alarm_ != nullptr) {
    alarm_->ledger().begin_wait(number_);
  }
  for (const auto& work : works_) {
    work->wait();
  }
  if (alarm_ != nullptr) {
    alarm_->ledger().finish(number_);
  }
}

void PendingCollective::wait_on_device(const Streams& streams) const {
  if (record_) {
    record_->wait_begin = streams.record_timed(StreamRole::Compute);
  }
  streams.wait(StreamRole::Compute, done_);
  if (record_) {
    record_->wait_end = streams.record_timed(StreamRole::Compute);
  }
}

Collectives::Collectives(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const Streams& streams,
    Alarm* alarm,
    const c10::intrusive_ptr<c10d::ProcessGroup>& reductions,
    bool sums_in_order,
    StreamRole reducing)
    : group_(std::move(group)),
      backend_(group_->getBackend(streams.device().type())),
      reductions_(reductions ? reductions->getBackend(streams.device().type()) : backend_),
      streams_(streams),
      reducing_(reducing),
      launches_together_(streams.has_streams() && backend_->supportsCoalescing()),
      methods_(WireMethods::of_backend(backend_->getBackendName(), size(), sums_in_order)),
      alarm_(alarm) {
  if (backend_->getBackendName() == "gloo") {
    const auto link = ControlLink::of(backend_);
    guard_ = {link, &link->guard()};
    user_ = guard_->add_user();
    if (size() == 2 && !wire::share_loopback(*backend_)) {
      methods_.send_pieces();
    }
  }
}

template <typename Block>
void Collectives::wait_in(const PendingCollective& pending, const Block& block) const {
  if (alarm_ != nullptr) {
    alarm_->ledger().begin_wait(pending.number_);
  }
  try {
    block();
  } catch (const std::exception& error) {
    pending.fail(pending.op_, error);
  }
  if (alarm_ != nullptr) {
    alarm_->ledger().end_wait();
  }
}

// Before a collective is issued: notes it, and makes sure that the others issue it too.
void Collectives::announce(PendingCollective& pending, UnitId id, int64_t nbytes) {
  pending.alarm_ = alarm_;
  if (alarm_ != nullptr) {
    alarm_->check();
    pending.number_ = alarm_->ledger().begin(pending.op_, *pending.unit_, nbytes);
  }
  if (guard_ == nullptr) {
    return;
  }
  const uint64_t op = std::hash<std::string_view>()(pending.op_);
  uint64_t collective = mix(mix(user_, op), static_cast<uint64_t>(id));
  collective = mix(mix(collective, static_cast<uint64_t>(nbytes)), facts_);
  if (guard_->must_compare(collective)) {
    wait_in(pending, [&] { guard_->compare(collective); });
  }
}

// On the role's stream, and not longer on it than needed: what is recorded there would take it for
// the one that computes.
template <typename Issue>
void Collectives::issue_on(StreamRole role, PendingCollective& pending, const Issue& issue) {
  const bool async = !streams_.has_streams();
  const auto guard = streams_.use(role);
  try {
    pending.works_ = issue(async);
    std::erase(pending.works_, nullptr);
    // NCCL has none then: what it does is the stream's work. Gloo does it on threads and streams of
    // its own even so, and the role's stream is to go on behind them.
    if (!async && !pending.works_.empty()) {
      pending.wait_on_host();
    }
  } catch (const std::exception& error) {
    pending.fail(pending.op_, error);
  }
}

template <typename Issue>
PendingCollective Collectives::start(
    const char* op,
    StreamRole role,
    Operands operands,
    CollectiveTag tag,
    const Issue& issue) {
  PendingCollective pending = begin(op, role, operands, std::move(tag));
  issue_on(role, pending, issue);
  finish(pending, std::move(operands), role, nullptr);
  return pending;
}

PendingCollective Collectives::begin(
    const char* op,
    StreamRole role,
    const Operands& operands,
    CollectiveTag tag) {
  PendingCollective pending;
  pending.op_ = op;
  pending.unit_ = tag.unit;
  pending.record_ = std::move(tag.record);
  int64_t nbytes = 0;
  for (const at::Tensor& tensor : operands.writes) {
    nbytes += static_cast<int64_t>(tensor.nbytes());
  }
  announce(pending, tag.id, tag.nbytes.value_or(nbytes));
  if (pending.record_) {
    pending.record_->begin = streams_.record_timed(role);
  }
  return pending;
}

// `done`: behind it and others; null if there is none yet.
void Collectives::finish(
    PendingCollective& pending,
    Operands operands,
    StreamRole role,
    StreamEvent done) const {
  for (const at::Tensor& tensor : operands.reads) {
    streams_.note_read(role, tensor, pending.op_, *pending.unit_);
  }
  for (const at::Tensor& tensor : operands.writes) {
    streams_.note_write(role, tensor, pending.op_, *pending.unit_);
  }
  pending.keep_alive_ = std::move(operands.reads);
  std::move(
      operands.writes.begin(), operands.writes.end(), std::back_inserter(pending.keep_alive_));
  pending.done_ = done == nullptr ? streams_.record(role) : std::move(done);
  if (pending.record_) {
    trace_completion(pending);
  }
}

std::vector<PendingCollective> Collectives::start_together(
    TraceOp op,
    std::vector<CollectiveCall> calls) {
  const auto role = op == TraceOp::AllGather ? StreamRole::AllGather : reducing_;
  std::vector<PendingCollective> pending;
  for (CollectiveCall& call : calls) {
    pending.push_back(
        begin(trace_op_name(op), role, {{call.from}, {call.to}}, std::move(call.tag)));
  }
  issue_on(role, pending.back(), [&](bool async) {
    c10d::Backend& backend = op == TraceOp::AllGather ? *backend_ : *reductions_;
    return wire::launch_together(backend, [&] {
      for (const CollectiveCall& call : calls) {
        if (op == TraceOp::AllGather) {
          wire::gather(backend, methods_.gather, call.to, call.from, async);
        } else if (op == TraceOp::ReduceScatter) {
          wire::reduce(backend, methods_.reduce, call.to, call.from, async);
        } else {
          wire::all_reduce(backend, call.to, async);
        }
      }
    });
  });
  const StreamEvent done = streams_.record(role);
  for (size_t i = 0; i < calls.size(); ++i) {
    finish(pending[i], {{calls[i].from}, {calls[i].to}}, role, done);
  }
  return pending;
}

void Collectives::trace_completion(const PendingCollective& pending) const {
  if (streams_.has_streams()) {
    pending.record_->end = streams_.record_timed(pending.done_->role);
    return;
  }
  pending.record_->note_done(); // if there is no work any more
  for (const auto& work : pending.works_) {
    work->getFuture()->addCallback(
        [record = pending.record_](c10::ivalue::Future&) { record->note_done(); });
  }
}

PendingCollective Collectives::all_gather(
    const at::Tensor& full,
    const at::Tensor& own,
    CollectiveTag tag) {
  const OwnCollective* given = tag.own;
  return start(
      "all_gather", StreamRole::AllGather, {{own}, {full}}, std::move(tag), [&](bool async) {
        return given != nullptr ? wire::Works{(*given)(full, own)}
                                : wire::gather(*backend_, methods_.gather, full, own, async);
      });
}

PendingCollective Collectives::gather_sums(
    const at::Tensor& full,
    const at::Tensor& own,
    CollectiveTag tag) {
  return start("gather_sums", reducing_, {{}, {full}}, std::move(tag), [&](bool async) {
    return wire::gather(*reductions_, methods_.gather, full, own, async);
  });
}

PendingCollective Collectives::reduce_scatter(
    const at::Tensor& received,
    const at::Tensor& full,
    CollectiveTag tag) {
  const OwnCollective* given = tag.own;
  return start("reduce_scatter", reducing_, {{full}, {received}}, std::move(tag), [&](bool async) {
    return given != nullptr ? wire::Works{reduce_by(*given, received, full, size())}
                            : wire::reduce(*reductions_, methods_.reduce, received, full, async);
  });
}

PendingCollective Collectives::all_reduce(const at::Tensor& tensor, CollectiveTag tag) {
  return start("all_reduce", reducing_, {{}, {tensor}}, std::move(tag), [&](bool async) {
    return wire::all_reduce(*reductions_, tensor, async);
  });
}

PendingCollective Collectives::all_to_all(
    const at::Tensor& received,
    const at::Tensor& sent,
    MessageSizes sizes,
    CollectiveTag tag) {
  tag.nbytes = sizes.total_nbytes;
  return start("all_to_all", reducing_, {{sent}, {received}}, std::move(tag), [&](bool async) {
    at::Tensor to = received;
    at::Tensor from = sent;
    c10d::AllToAllOptions options;
    options.asyncOp = async;
    return wire::Works{reductions_->alltoall_base(to, from, sizes.received, sizes.sent, options)};
  });
}

PendingCollective Collectives::broadcast(const at::Tensor& bytes, CollectiveTag tag) {
  return start("broadcast", StreamRole::AllGather, {{}, {bytes}}, std::move(tag), [&](bool async) {
    std::vector<at::Tensor> tensors = {bytes};
    c10d::BroadcastOptions options;
    options.asyncOp = async;
    return wire::Works{backend_->broadcast(tensors, options)};
  });
}

} // namespace zerocore
