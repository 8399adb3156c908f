// An emulated link between a device and the host.
//
// Each direction carries one transfer at a time, in the time that the model says, its real copy
// included; the two do not disturb each other. See runtime/link_worker.h.
#pragma once

#include <exception>
#include <functional>
#include <future>
#include <memory>

#include "common/types.h"
#include "runtime/link_model.h"
#include "runtime/link_worker.h"
#include "runtime/trace.h"

namespace zerocore {

class HostLink {
 public:
  explicit HostLink(const LinkModel& model) : model_(model) {}
  // Fails what is under way.
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  // Carries `nbytes`, which `copy` moves, to the host or from it. The record, if there is one, gets
  // its times. Any thread; what is returned is ready when all has come, or has the error.
  std::shared_future<void> carry(
      bool to_host,
      int64_t nbytes,
      std::function<void()> copy,
      std::shared_ptr<OpenRecord> record);

 private:
  LinkModel model_;
  std::shared_ptr<LinkWorker> to_host_ = std::make_shared<LinkWorker>();
  std::shared_ptr<LinkWorker> from_host_ = std::make_shared<LinkWorker>();
};

} // namespace zerocore
