// Issues a collective, waits for it, and notes its times.
#include "comm/pending_collective.h"

#include <utility>

namespace zerocore {

PendingCollective::PendingCollective(
    IssueWatch& watch,
    const Streams& streams,
    StreamRole role,
    const char* op,
    const CollectiveTag& tag,
    at::Tensor to,
    at::Tensor from)
    : watched_(watch.begin(
          op,
          *tag.unit,
          tag.id,
          tag.nbytes.value_or(static_cast<int64_t>(to.nbytes())))),
      role_(role),
      keep_alive_({std::move(to), std::move(from)}),
      record_(tag.record) {
  const auto& [writes, reads] = keep_alive_;
  if (reads.defined()) {
    streams.note_read(role, reads, op, *tag.unit);
  }
  streams.note_write(role, writes, op, *tag.unit);
  if (record_) {
    record_->begin = streams.record_timed(role);
  }
}

void PendingCollective::issue(
    const Streams& streams,
    const std::function<Works(bool async)>& issue) {
  const bool async = !streams.has_streams();
  { // narrow scope: record() below must see the caller's stream as the compute stream
    const auto guard = streams.use(role_);
    watched_.run([&] {
      works_ = issue(async);
      std::erase(works_, nullptr);
    });
    // NCCL then returns no work: the stream runs the collective. Gloo uses its own threads and
    // streams even then, so the role's stream must wait for them.
    if (!async && !works_.empty()) {
      wait_on_host(watched_);
    }
  }
  done_ = streams.record(role_);
  trace_end(streams);
}

void PendingCollective::end_with(const PendingCollective& other, const Streams& streams) {
  if (&other != this) {
    done_ = other.done_;
    trace_end(streams);
  }
}

void PendingCollective::trace_end(const Streams& streams) const {
  if (record_ != nullptr && streams.has_streams()) {
    record_->end = streams.record_timed(role_);
  } else if (record_ != nullptr) {
    record_->note_done(); // without a work, the collective is done
    for (const auto& work : works_) {
      work->getFuture()->addCallback(
          [record = record_](c10::ivalue::Future&) { record->note_done(); });
    }
  }
}

void PendingCollective::wait(const Streams& streams) {
  const WatchedCollective watched = std::exchange(watched_, {});
  if (!watched) {
    return;
  }
  const int64_t begin = record_ ? now_ns() : 0;
  if (done_ == nullptr) {
    wait_on_host(watched);
  } else {
    watched.run([&] { wait_on_device(streams); });
  }
  if (record_) {
    record_->wait_ns += now_ns() - begin; // on a device, the events' time replaces it
  }
  *this = {};
}

void PendingCollective::wait_on_host(const WatchedCollective& watched) const {
  watched.wait([this] {
    for (const auto& work : works_) {
      work->wait();
    }
  });
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

void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams) {
  for (auto pending = collectives.rbegin(); pending != collectives.rend(); ++pending) {
    pending->wait(streams);
  }
  collectives.clear();
}

} // namespace zerocore
