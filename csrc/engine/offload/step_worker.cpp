#include "engine/offload/step_worker.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace zerocore {

StepWorker::~StepWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

StepWorker::Ticket StepWorker::submit(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
  return ++submitted_;
}

StepWorker::Ticket StepWorker::submit(std::shared_ptr<OpenRecord> record, Work work) {
  if (record == nullptr) {
    return submit(std::move(work));
  }
  return submit([record = std::move(record), work = std::move(work)] {
    record->note_begun();
    work();
    record->note_done();
  });
}

void StepWorker::wait(Ticket ticket, const std::shared_ptr<OpenRecord>& record) {
  const int64_t begin = now_ns();
  std::vector<Work> spent; // destroyed after the lock is released
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
  std::swap(spent, spent_);
  if (record != nullptr) {
    record->wait_ns += now_ns() - begin;
  }
}

std::exception_ptr StepWorker::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, nullptr);
}

void StepWorker::run() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  use_host_threads(num_threads_);
  if (!device_.is_cpu()) {
    c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  }
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    spent_.push_back(std::move(work));
    error_ = error_ == nullptr ? error : error_;
    ++done_;
    changed_.notify_all();
  }
}

} // namespace zerocore
