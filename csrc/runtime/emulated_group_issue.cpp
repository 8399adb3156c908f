// How collectives of the emulated link are carried out: on its thread, or on a device's stream.
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "runtime/device_timer.h"
#include "runtime/emulated_group.h"

namespace zerocore {

namespace {

// Deadlines in flight at a time; many more than streams could hold back.
constexpr int64_t kNumDeadlines = 4096;

std::shared_ptr<c10::Event> record(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

} // namespace

// Kernels that have not begun yet would take what comes after the clock for their deadline.
EmulatedGroup::DeviceLink::~DeviceLink() {
  try {
    for (const auto& [user, done] : last) {
      done->block(home);
    }
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: the device failed while an emulated group was freed: ", error.what());
  }
}

EmulatedGroup::EmulatedGroup(
    int rank,
    int size,
    const LinkModel& link,
    std::chrono::milliseconds timeout,
    Unlocked unlocked)
    : Backend(rank, size), link_(link), timeout_(timeout), unlocked_(std::move(unlocked)) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < size,
      "rank must be in 0..",
      size - 1,
      " (world size less 1), got ",
      rank);
  link.validate();
}

EmulatedGroup::~EmulatedGroup() {
  EmulatedGroup::shutdown();
}

void EmulatedGroup::shutdown() {
  unlocked_([this] { worker_->stop(); });
}

LinkModel EmulatedGroup::link() const {
  const std::lock_guard lock(mutex_);
  return link_;
}

void EmulatedGroup::set_link(const LinkModel& link) {
  link.validate();
  const std::lock_guard lock(mutex_);
  link_ = link;
}

void EmulatedGroup::startCoalescing() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!coalesced_, "startCoalescing() was called twice");
  coalesced_.emplace();
}

EmulatedGroup::WorkPtr EmulatedGroup::endCoalescing() {
  std::optional<Batch> batch;
  {
    const std::lock_guard lock(mutex_);
    batch = std::exchange(coalesced_, std::nullopt);
  }
  TORCH_CHECK(batch, "endCoalescing() without startCoalescing()");
  batch->call.op = c10d::OpType::COALESCED;
  return issue(std::move(*batch));
}

EmulatedGroup::WorkPtr EmulatedGroup::issue(Call call) {
  Batch batch;
  {
    const std::lock_guard lock(mutex_);
    const double transfer = transfer_ns(link_, call.traffic, call.nbytes, size_);
    if (coalesced_) {
      Batch& all = *coalesced_;
      all.transfer_ns += transfer;
      all.call.async = call.async;
      auto& outputs = all.call.outputs;
      outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
      std::move(call.moves.begin(), call.moves.end(), std::back_inserter(all.call.moves));
      return {};
    }
    batch = {std::move(call), transfer};
  }
  return issue(std::move(batch));
}

EmulatedGroup::WorkPtr EmulatedGroup::issue(Batch batch) {
  const Call& call = batch.call;
  const c10::Device device =
      call.outputs.empty() ? c10::Device(c10::kCPU) : call.outputs[0].device();
  auto work = c10::make_intrusive<EmulatedWork>(rank_, call.op, call.outputs, device, timeout_);
  const int64_t ns = duration_ns(link(), batch.transfer_ns);
  ++sequence_;
  if (device.is_cpu()) {
    issue_on_cpu(work, std::move(batch), ns);
  } else {
    issue_on_device(work, std::move(batch), ns, device);
  }
  return work;
}

void EmulatedGroup::issue_on_cpu(
    const c10::intrusive_ptr<EmulatedWork>& work,
    Batch batch,
    int64_t ns) {
  LinkWorker::Job job;
  job.duration_ns = ns;
  job.transfer = [moves = std::move(batch.call.moves)] {
    for (const Move& move : moves) {
      carry_out(move);
    }
  };
  job.finish = [work](const std::exception_ptr& error) { work->complete(error); };
  worker_->submit(std::move(job));
}

EmulatedGroup::DeviceLink& EmulatedGroup::device_link(c10::Device device) {
  for (const auto& link : device_links_) {
    if (link->device == device) {
      return *link;
    }
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream own = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  const c10::Stream home = guard.getStream(device);
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor clock = at::zeros({1 + kNumDeadlines}, options);
  // Other streams use the clock without being ordered behind this one, so it is waited for here.
  record(home)->synchronize();
  device_links_.emplace_back(new DeviceLink{device, own, home, clock});
  return *device_links_.back();
}

void EmulatedGroup::issue_on_device(
    const c10::intrusive_ptr<EmulatedWork>& work,
    Batch batch,
    int64_t ns,
    c10::Device device) {
  const DeviceTimer* timer = device_timer();
  TORCH_CHECK(
      timer != nullptr,
      "this build of zerocore has no CUDA code, so it cannot emulate on ",
      device);
  const std::lock_guard lock(mutex_);
  DeviceLink& own = device_link(device);
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const c10::Stream stream = batch.call.async ? own.stream : current;
  if (stream != current) {
    record(current)->block(stream);
  }
  const c10::StreamGuard guard(stream);
  auto* clock = reinterpret_cast<uint64_t*>(own.clock.data_ptr<int64_t>());
  uint64_t* deadline = clock + 1 + own.next_deadline++ % kNumDeadlines;
  if (ns > 0) {
    timer->book(clock, deadline, ns);
  }
  for (const Move& move : batch.call.moves) {
    carry_out(move);
  }
  if (ns > 0) {
    timer->hold(deadline, link_.sms);
  }
  own.last[stream] = record(stream);
  work->issued(own.last[stream], std::move(batch.call.moves));
}

} // namespace zerocore
