// Collectives over a c10d backend.
//
// The backend is called directly, not through the dispatcher: 5 us less of host time a call.
#include "runtime/collectives.h"

#include <c10/util/Exception.h>

#include <functional>
#include <iterator>
#include <string_view>
#include <utility>

#include "common/math.h"
#include "runtime/alarm.h"
#include "runtime/emulated_group.h"
#include "runtime/issue_guard.h"

namespace zerocore {

namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

Works broadcast_slices(c10d::Backend& backend, const at::Tensor& full, const at::Tensor& own) {
  const int64_t numel = own.numel();
  const at::Tensor slice = full.narrow(0, backend.getRank() * numel, numel);
  if (slice.data_ptr() != own.data_ptr()) {
    slice.copy_(own);
  }
  Works works;
  for (int64_t root = 0; root < backend.getSize(); ++root) {
    std::vector<at::Tensor> tensors = {full.narrow(0, root * numel, numel)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    works.push_back(backend.broadcast(tensors, options));
  }
  return works;
}

Works gather(
    c10d::Backend& backend,
    const GatherMethod& method,
    const at::Tensor& full,
    const at::Tensor& own,
    bool async) {
  switch (method.kind) {
    case GatherMethod::Kind::AllGather:
      return all_gather(backend, full, own, async);
    case GatherMethod::Kind::Broadcasts:
      return broadcast_slices(backend, full, own);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Works reduce(
    c10d::Backend& backend,
    const ReduceMethod& method,
    at::Tensor received,
    at::Tensor full,
    bool async) {
  switch (method.kind) {
    case ReduceMethod::Kind::ReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.asyncOp = async;
      return {backend._reduce_scatter_base(received, full, options)};
    }
    case ReduceMethod::Kind::Exchange: {
      std::vector<int64_t> even;
      c10d::AllToAllOptions options;
      options.asyncOp = async;
      return {backend.alltoall_base(received, full, even, even, options)};
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace

void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams) {
  for (auto pending = collectives.rbegin(); pending != collectives.rend(); ++pending) {
    pending->wait(streams);
  }
  collectives.clear();
}

void PendingCollective::wait(const Streams& streams) {
  if (!pending()) {
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
  if (alarm_ == nullptr) {
    for (const auto& work : works_) {
      work->wait();
    }
    return;
  }
  alarm_->ledger().begin_wait(number_);
  for (const auto& work : works_) {
    alarm_->wait(*work);
  }
  alarm_->ledger().finish(number_);
}

void PendingCollective::fail(const char* op, const std::exception& error) const {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const char* reason = torch_error ? torch_error->what_without_backtrace() : error.what();
  const std::string what = c10::str(op, " of ", *unit_, " failed: ", reason);
  if (alarm_ != nullptr) {
    alarm_->fail(what);
  }
  TORCH_CHECK_WITH(
      DistBackendError, false, what, ". Did a rank stop, or call other units than this one?");
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
    Alarm* alarm)
    : group_(std::move(group)),
      backend_(group_->getBackend(streams.device().type())),
      streams_(streams),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      methods_(WireMethods::of_backend(backend_->getBackendName())),
      alarm_(alarm) {
  if (!streams_.has_streams()) {
    emulated_ = dynamic_cast<EmulatedGroup*>(backend_.get());
  }
  if (backend_->getBackendName() == "gloo") {
    guard_ = IssueGuard::of(backend_);
    user_ = guard_->add_user();
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
    compare(pending, collective);
  }
}

void Collectives::compare(const PendingCollective& pending, uint64_t collective) const {
  if (alarm_ != nullptr) {
    alarm_->ledger().begin_wait(pending.number_);
  }
  try {
    guard_->compare(collective);
  } catch (const std::exception& error) {
    pending.fail(pending.op_, error);
  }
  if (alarm_ != nullptr) {
    alarm_->ledger().end_wait();
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
  issue_on(role, pending, issue);
  for (const at::Tensor& tensor : operands.reads) {
    streams_.note_read(role, tensor, op, *tag.unit);
  }
  for (const at::Tensor& tensor : operands.writes) {
    streams_.note_write(role, tensor, op, *tag.unit);
  }
  pending.keep_alive_ = std::move(operands.reads);
  std::move(
      operands.writes.begin(), operands.writes.end(), std::back_inserter(pending.keep_alive_));
  pending.done_ = streams_.record(role);
  if (pending.record_) {
    trace_completion(pending);
  }
  return pending;
}

void Collectives::trace_completion(const PendingCollective& pending) const {
  if (streams_.has_streams()) {
    pending.record_->end = streams_.record_timed(pending.done_->role);
    return;
  }
  for (const auto& work : pending.works_) {
    work->getFuture()->addCallback([record = pending.record_](c10::ivalue::Future&) {
      record->done_ns = std::max(record->done_ns, now_ns());
    });
  }
}

PendingCollective Collectives::all_gather(
    const at::Tensor& full,
    const at::Tensor& own,
    CollectiveTag tag,
    const std::shared_future<void>& after) {
  if (after.valid()) {
    TORCH_INTERNAL_ASSERT(holds());
    emulated_->hold_next(after);
  }
  return start(
      "all_gather", StreamRole::AllGather, {{own}, {full}}, std::move(tag), [&](bool async) {
        return gather(*backend_, methods_.gather, full, own, async);
      });
}

PendingCollective Collectives::reduce_scatter(
    const at::Tensor& received,
    const at::Tensor& full,
    CollectiveTag tag) {
  return start(
      "reduce_scatter",
      StreamRole::ReduceScatter,
      {{full}, {received}},
      std::move(tag),
      [&](bool async) { return reduce(*backend_, methods_.reduce, received, full, async); });
}

PendingCollective Collectives::all_reduce(
    const at::Tensor& tensor,
    CollectiveTag tag,
    c10d::ReduceOp::RedOpType op) {
  return start(
      "all_reduce", StreamRole::ReduceScatter, {{}, {tensor}}, std::move(tag), [&](bool async) {
        std::vector<at::Tensor> tensors = {tensor};
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        options.asyncOp = async;
        return Works{backend_->allreduce(tensors, options)};
      });
}

PendingCollective Collectives::all_to_all(
    const at::Tensor& received,
    const at::Tensor& sent,
    MessageSizes sizes,
    CollectiveTag tag) {
  tag.nbytes = sizes.total_nbytes;
  return start(
      "all_to_all",
      StreamRole::ReduceScatter,
      {{sent}, {received}},
      std::move(tag),
      [&](bool async) {
        at::Tensor to = received;
        at::Tensor from = sent;
        c10d::AllToAllOptions options;
        options.asyncOp = async;
        return Works{backend_->alltoall_base(to, from, sizes.received, sizes.sent, options)};
      });
}

PendingCollective Collectives::broadcast(const at::Tensor& bytes, CollectiveTag tag) {
  return start("broadcast", StreamRole::AllGather, {{}, {bytes}}, std::move(tag), [&](bool async) {
    std::vector<at::Tensor> tensors = {bytes};
    c10d::BroadcastOptions options;
    options.asyncOp = async;
    return Works{backend_->broadcast(tensors, options)};
  });
}

} // namespace zerocore
