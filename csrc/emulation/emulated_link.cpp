// Carries out collectives on the link's thread, or on a device's stream.
#include "emulation/emulated_link.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "emulation/device_timer.h"

namespace zerocore {

void LinkModel::validate() const {
  TORCH_CHECK_VALUE(
      bandwidth > 0.0, "bandwidth must be positive bytes per second, got ", bandwidth);
  TORCH_CHECK_VALUE(
      latency >= 0.0 && std::isfinite(latency),
      "latency must be finite seconds, 0 or more, got ",
      latency);
  TORCH_CHECK_VALUE(sms >= 0, "sms must be 0 or more, got ", sms);
}

namespace {

// Returns the bytes in the busiest direction of a rank's link, over the collective's bytes (of the
// full tensor: all slices). These are the factors between "algorithm" and "bus" bandwidth in
// PERFORMANCE.md of NVIDIA's nccl-tests: (N-1)/N, twice that for an all-reduce (a reduce-scatter
// and an all-gather), 1 for broadcast and reduce. All are 0 in a world of one rank.
double traffic_factor(Traffic traffic, int64_t world_size) {
  if (world_size == 1) {
    return 0.0;
  }
  const auto n = static_cast<double>(world_size);
  switch (traffic) {
    case Traffic::AllReduce:
      return 2.0 * (n - 1.0) / n;
    case Traffic::Broadcast:
    case Traffic::Reduce:
      return 1.0;
    case Traffic::Barrier:
      return 0.0;
    default:
      return (n - 1.0) / n;
  }
}

} // namespace

double transfer_ns(const LinkModel& link, Traffic traffic, int64_t nbytes, int64_t world_size) {
  return static_cast<double>(nbytes) * traffic_factor(traffic, world_size) / link.bandwidth * 1e9;
}

int64_t duration_ns(const LinkModel& link, double transfer_ns) {
  return std::llround(link.latency * 1e9 + transfer_ns);
}

namespace {

// The end of a wait spins, because wake-up times vary by about this much.
constexpr auto kSpin = std::chrono::microseconds(40);
// The longest delay that counts as a late wake-up by the system.
constexpr auto kMaxLateness = std::chrono::microseconds(500);

std::exception_ptr stopped_error() {
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, __LINE__},
          "the emulated group was destroyed before the collective was done"));
}

} // namespace

void LinkWorker::submit(Job job) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(
      DistBackendError, !stopping_, "the emulated group was destroyed; make a new one");
  job.submitted = Clock::now();
  queue_.push_back(std::move(job));
  if (!thread_.joinable()) {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  changed_.notify_one();
}

void LinkWorker::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    std::swap(thread, thread_);
  }
  changed_.notify_all();
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else if (thread.joinable()) {
    thread.join();
  }
}

void LinkWorker::run() {
  prctl(PR_SET_TIMERSLACK, 1); // keeps the system from delaying timers to bundle them
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    Job next = std::move(queue_.front());
    queue_.pop_front();
    const bool stopping = stopping_;
    lock.unlock();
    if (stopping) {
      next.finish(stopped_error());
    } else {
      carry_out(std::move(next));
    }
    // Before locking: freeing the objects of the job may run any code.
    next = {};
    lock.lock();
  }
}

void LinkWorker::carry_out(Job job) {
  free_at_ = std::max(job.submitted, free_at_) + std::chrono::nanoseconds(job.duration_ns);
  std::exception_ptr error;
  try {
    job.transfer();
  } catch (...) {
    error = std::current_exception();
  }
  // A late wake-up must not delay the next job; a slow transfer must.
  free_at_ = std::max(free_at_, Clock::now());
  if (!wait_until(free_at_)) {
    error = stopped_error();
  }
  job.finish(error);
}

bool LinkWorker::wait_until(Clock::time_point deadline) {
  // An idle processor of a virtual machine takes up to a few hundred microseconds to wake up. So
  // the alarm is set earlier, by the lateness of the last ones.
  const auto alarm = deadline - kSpin - lateness_;
  if (Clock::now() < alarm) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_until(lock, alarm, [this] { return stopping_; })) {
      return false;
    }
    const auto late = std::min<Clock::duration>(Clock::now() - alarm, kMaxLateness);
    lateness_ += (late - lateness_) / 8;
  }
  while (Clock::now() < deadline) {
  }
  return true;
}

namespace {

// Deadlines in flight; many more than streams could hold back.
constexpr int64_t kNumDeadlines = 4096;

std::shared_ptr<c10::Event> record(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

} // namespace

// Kernels that have not begun yet read their deadlines from the clock, so its memory must live
// until they end.
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
  // Other streams use the clock without waiting for this stream, so the host waits here.
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
    communicator.last->block(stream); // before booking: it must not book ahead of the last one
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
