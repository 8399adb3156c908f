// An emulated link between a device and the host.
//
// Each direction carries one transfer at a time, in the time that the model says, its real copy
// included; the two do not disturb each other. See emulation/link_worker.h.
#pragma once

#include <exception>
#include <functional>
#include <future>
#include <memory>

#include "common/types.h"
#include "emulation/link_model.h"
#include "emulation/link_worker.h"
#include "runtime/trace.h"

namespace zerocore {

// Something that others wait for; any thread.
class Arrival {
 public:
  void set(const std::exception_ptr& error) {
    error != nullptr ? promise_.set_exception(error) : promise_.set_value();
  }
  // Ready when it has come, or has the error.
  const std::shared_future<void>& future() const {
    return future_;
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

class HostLink {
 public:
  struct Transfer {
    bool to_host = false; // or from it
    int64_t nbytes = 0;
    std::function<void()> copy; // moves them
    std::shared_ptr<OpenRecord> record; // gets its times; null for none
    std::shared_future<void> after = {}; // begins behind it; not valid for at once
    std::shared_ptr<Arrival> arrival = std::make_shared<Arrival>();
  };

  explicit HostLink(const LinkModel& model) : model_(model) {}
  // Fails what is under way.
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  // Any thread. Its arrival is set when all has come.
  void carry(Transfer transfer);

 private:
  LinkModel model_;
  std::shared_ptr<LinkWorker> to_host_ = std::make_shared<LinkWorker>();
  std::shared_ptr<LinkWorker> from_host_ = std::make_shared<LinkWorker>();
};

} // namespace zerocore
