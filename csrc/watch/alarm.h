// The alarm as one model sees it, see Note [Alarm].
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "watch/group_watch.h"
#include "watch/ledger.h"

namespace zerocore {

class Alarm {
 public:
  // `model` names its class, `params` its parameters.
  Alarm(
      std::shared_ptr<GroupWatch> watch,
      std::optional<double> stall_seconds,
      std::string model,
      std::vector<std::string> params)
      : watch_(std::move(watch)), ledger_(std::move(model), std::move(params)) {
    watch_->add(ledger_, stall_seconds);
  }
  Alarm(const Alarm&) = delete; // the watch has the ledger's address
  ~Alarm() {
    retire();
  }
  // The model's units end: their names are not read any more.
  void retire() {
    watch_->remove(ledger_);
  }

  Ledger& ledger() {
    return ledger_;
  }
  bool is_raised() const {
    return watch_->is_raised();
  }
  // These three as of GroupWatch.
  void check() const {
    watch_->check();
  }
  [[noreturn]] void fail(const std::string& what) {
    watch_->fail(what);
  }
  void note_failure(const std::string& what) {
    watch_->note_failure(what);
  }

 private:
  const std::shared_ptr<GroupWatch> watch_;
  Ledger ledger_;
};

} // namespace zerocore
