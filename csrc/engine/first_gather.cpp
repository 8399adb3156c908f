// Begins the first gather of a forward at an optimizer's step.
#include "engine/first_gather.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace zerocore {

void FirstGather::begin_update(const std::vector<UnitId>& units) {
  if (!is_on()) {
    return;
  }
  ++num_steps_;
  if (std::find(units.begin(), units.end(), pending_) != units.end()) {
    drop();
  }
}

void FirstGather::begin() {
  const at::NoGradGuard no_grad;
  const UnitId id = parts_.schedule.order().front().unit;
  if (parts_.schedule.is_resident(id)) {
    return;
  }
  lifecycle_.refresh(id);
  lifecycle_.order_gathers();
  pending_ = id;
  try {
    parts_.schedule.residency().gather_ahead(id, parts_.actions);
    lifecycle_.run(parts_.actions);
  } catch (...) {
    parts_.schedule.residency().drop_ahead(std::exchange(pending_, -1), parts_.actions);
    lifecycle_.settle();
    throw;
  }
}

void FirstGather::drop() {
  if (pending_ >= 0) {
    parts_.schedule.residency().drop_ahead(std::exchange(pending_, -1), parts_.actions);
    lifecycle_.run(parts_.actions);
  }
}

void FirstGather::begin_pass() {
  pending_ = -1;
  if (num_steps_ > 0) {
    expected_steps_ = std::exchange(num_steps_, 0);
  }
}

} // namespace zerocore
