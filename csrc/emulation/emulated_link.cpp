// Carries out collectives on the link's thread, or on a device's stream.
#include "emulation/emulated_link.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "emulation/device_timer.h"

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
    for (const Communicator& each : communicators) {
      if (each.last != nullptr) {
        each.last->block(home);
      }
    }
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: the device failed while an emulated group was freed: ", error.what());
  }
}

LinkModel EmulatedLink::model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

void EmulatedLink::set_model(const LinkModel& model) {
  const std::lock_guard lock(mutex_);
  model_ = model;
}

int EmulatedLink::add_communicator() {
  const std::lock_guard lock(mutex_);
  return num_communicators_++;
}

EmulatedLink::WorkPtr EmulatedLink::carry(Transfer transfer, int communicator) {
  const auto& outputs = transfer.outputs;
  const c10::Device device = outputs.empty() ? c10::Device(c10::kCPU) : outputs[0].device();
  auto work = c10::make_intrusive<EmulatedWork>(rank_, transfer.op, outputs, device, timeout_);
  const int64_t ns = duration_ns(model(), transfer.ns);
  if (device.is_cpu()) {
    carry_on_cpu(work, std::move(transfer), ns);
  } else {
    TORCH_CHECK(
        device_timer() != nullptr,
        "this build of zerocore has no CUDA code, so it cannot emulate on ",
        device);
    const std::lock_guard lock(mutex_);
    DeviceLink& own = device_link(device);
    carry_on_device(work, std::move(transfer), ns, own, find(own, communicator));
  }
  return work;
}

void EmulatedLink::carry_on_cpu(const WorkPtr& work, Transfer transfer, int64_t ns) {
  LinkWorker::Job job;
  job.duration_ns = ns;
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
  const c10::Stream home = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor clock = at::zeros({1 + kNumDeadlines}, options);
  // Other streams use the clock without being ordered behind this one, so it is waited for here.
  record(home)->synchronize();
  device_links_.emplace_back(new DeviceLink{device, home, clock});
  return *device_links_.back();
}

EmulatedLink::Communicator& EmulatedLink::find(DeviceLink& link, int communicator) {
  const c10::impl::VirtualGuardImpl guard(link.device.type());
  while (static_cast<int>(link.communicators.size()) <= communicator) {
    const auto stream = guard.getStreamFromGlobalPool(link.device, /*isHighPriority=*/true);
    link.communicators.push_back({stream, stream});
  }
  return link.communicators[communicator];
}

void EmulatedLink::carry_on_device(
    const WorkPtr& work,
    Transfer transfer,
    int64_t ns,
    DeviceLink& link,
    Communicator& communicator) {
  const DeviceTimer& timer = *device_timer();
  const auto current = c10::impl::VirtualGuardImpl(link.device.type()).getStream(link.device);
  const c10::Stream stream = transfer.async ? communicator.stream : current;
  if (stream != current) {
    record(current)->block(stream);
  }
  if (communicator.last != nullptr && communicator.last_stream != stream) {
    communicator.last->block(stream); // before it books: a later one must not book ahead of it
  }
  const c10::StreamGuard guard(stream);
  auto* clock = reinterpret_cast<uint64_t*>(link.clock.data_ptr<int64_t>());
  uint64_t* deadline = clock + 1 + link.next_deadline++ % kNumDeadlines;
  if (ns > 0) {
    timer.book(clock, deadline, ns);
  }
  for (const Move& move : transfer.moves) {
    carry_out(move);
  }
  if (ns > 0) {
    timer.hold(deadline, model_.sms);
  }
  communicator.last = record(stream);
  communicator.last_stream = stream;
  work->issued(communicator.last, std::move(transfer.moves));
}

} // namespace zerocore
