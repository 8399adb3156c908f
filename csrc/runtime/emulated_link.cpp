// Carries out collectives on the link's thread, or on a device's stream.
#include "runtime/emulated_link.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "runtime/device_timer.h"

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
EmulatedLink::DeviceLink::~DeviceLink() {
  try {
    for (const auto& [user, done] : last) {
      done->block(home);
    }
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: the device failed while an emulated group was freed: ", error.what());
  }
}

EmulatedLink::EmulatedLink(int rank, const LinkModel& model, std::chrono::milliseconds timeout)
    : rank_(rank), model_(model), timeout_(timeout) {
  model.validate();
}

LinkModel EmulatedLink::model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

void EmulatedLink::set_model(const LinkModel& model) {
  model.validate();
  const std::lock_guard lock(mutex_);
  model_ = model;
}

EmulatedLink::WorkPtr EmulatedLink::carry(Transfer transfer) {
  const auto& outputs = transfer.outputs;
  const c10::Device device = outputs.empty() ? c10::Device(c10::kCPU) : outputs[0].device();
  auto work = c10::make_intrusive<EmulatedWork>(rank_, transfer.op, outputs, device, timeout_);
  const int64_t ns = duration_ns(model(), transfer.ns);
  if (device.is_cpu()) {
    carry_on_cpu(work, std::move(transfer), ns);
  } else {
    carry_on_device(work, std::move(transfer), ns, device);
  }
  return work;
}

void EmulatedLink::carry_on_cpu(const WorkPtr& work, Transfer transfer, int64_t ns) {
  LinkWorker::Job job;
  job.duration_ns = ns;
  job.after = std::move(transfer.after);
  job.transfer = [moves = std::move(transfer.moves)] {
    for (const Move& move : moves) {
      carry_out(move);
    }
  };
  job.finish = [work](const std::exception_ptr& error) { work->complete(error); };
  worker_->submit(std::move(job));
}

EmulatedLink::DeviceLink& EmulatedLink::device_link(c10::Device device) {
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

void EmulatedLink::carry_on_device(
    const WorkPtr& work,
    Transfer transfer,
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
  const c10::Stream stream = transfer.async ? own.stream : current;
  if (stream != current) {
    record(current)->block(stream);
  }
  const c10::StreamGuard guard(stream);
  auto* clock = reinterpret_cast<uint64_t*>(own.clock.data_ptr<int64_t>());
  uint64_t* deadline = clock + 1 + own.next_deadline++ % kNumDeadlines;
  if (ns > 0) {
    timer->book(clock, deadline, ns);
  }
  for (const Move& move : transfer.moves) {
    carry_out(move);
  }
  if (ns > 0) {
    timer->hold(deadline, model_.sms);
  }
  own.last[stream] = record(stream);
  work->issued(own.last[stream], std::move(transfer.moves));
}

} // namespace zerocore
