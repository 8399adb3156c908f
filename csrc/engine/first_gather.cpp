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
  const UnitId id = schedule_.order().events().front().unit;
  if (schedule_.is_resident(id)) {
    return;
  }
  lifecycle_.refresh(id);
  lifecycle_.order_gathers();
  pending_ = id;
  try {
    lifecycle_.run([&](Actions& out) { schedule_.residency().gather_ahead(id, out); });
  } catch (...) {
    Actions ignored; // settle() reshards the unit
    schedule_.residency().drop_ahead(std::exchange(pending_, -1), ignored);
    lifecycle_.settle();
    throw;
  }
}

void FirstGather::drop() {
  if (pending_ >= 0) {
    const UnitId id = std::exchange(pending_, -1);
    lifecycle_.run([&](Actions& out) { schedule_.residency().drop_ahead(id, out); });
  }
}

void FirstGather::begin_pass() {
  pending_ = -1;
  if (num_steps_ > 0) {
    expected_steps_ = std::exchange(num_steps_, 0);
  }
}

} // namespace zerocore
