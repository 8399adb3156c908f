// An emulated link between a device and the host.
#include "runtime/host_link.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace zerocore {

HostLink::~HostLink() {
  to_host_->stop();
  from_host_->stop();
}

std::shared_future<void> HostLink::carry(
    bool to_host,
    int64_t nbytes,
    std::function<void()> copy,
    std::shared_ptr<OpenRecord> record) {
  const auto done = std::make_shared<std::promise<void>>();
  LinkWorker::Job job;
  job.duration_ns = duration_ns(model_, transfer_ns(model_, Traffic::Broadcast, nbytes, 2));
  job.transfer = [copy = std::move(copy), record] {
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    if (record != nullptr) {
      record->issued_ns = now_ns();
    }
    copy();
  };
  job.finish = [done, record](std::exception_ptr error) {
    if (record != nullptr) {
      record->done_ns = now_ns();
    }
    if (error != nullptr) {
      done->set_exception(error);
    } else {
      done->set_value();
    }
  };
  (to_host ? to_host_ : from_host_)->submit(std::move(job));
  return done->get_future().share();
}

} // namespace zerocore
