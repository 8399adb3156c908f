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

void HostLink::carry(Transfer transfer) {
  LinkWorker::Job job;
  job.duration_ns =
      duration_ns(model_, transfer_ns(model_, Traffic::Broadcast, transfer.nbytes, 2));
  job.after = std::move(transfer.after);
  job.transfer = [copy = std::move(transfer.copy), record = transfer.record] {
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    if (record != nullptr) {
      record->note_begun();
    }
    copy();
  };
  job.finish = [arrival = transfer.arrival,
                record = transfer.record](const std::exception_ptr& error) {
    if (record != nullptr) {
      record->note_done();
    }
    arrival->set(error);
  };
  (transfer.to_host ? to_host_ : from_host_)->submit(std::move(job));
}

} // namespace zerocore
