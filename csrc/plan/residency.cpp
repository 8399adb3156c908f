#include "plan/residency.h"

#include <algorithm>
#include <utility>

namespace zerocore {

Residency::Residency(const std::vector<UnitMesh>& meshes) {
  for (const UnitMesh& mesh : meshes) {
    UnitEntry& unit = units_.emplace_back();
    unit.gathers = mesh.shards_optimizer || mesh.shards_parameters;
    unit.releases = mesh.shards_parameters;
    unit.resident = !unit.releases;
    gathers_ = gathers_ || unit.gathers;
    releases_ = releases_ || unit.releases;
  }
}

bool Residency::all_stay() const {
  return std::ranges::all_of(units_, [](const UnitEntry& unit) {
    const bool is_kept = unit.uses.holds > 0 || unit.staying.after_forward;
    return unit.resident && (!unit.releases || is_kept);
  });
}

void Residency::unshard(UnitId unit, Actions& out) {
  UnitEntry& state = units_[unit];
  if (!state.resident) {
    state.resident = true;
    state.late = false;
    out.push_back({ActionKind::Unshard, unit});
  }
}

void Residency::end_residency(UnitId unit, bool late, Actions& out) {
  units_[unit].resident = false;
  units_[unit].late = late;
  if (!late) {
    out.push_back({ActionKind::Reshard, unit});
  }
}

void Residency::end_late(UnitId unit, Actions& out) {
  if (std::exchange(units_[unit].late, false)) {
    out.push_back({ActionKind::Reshard, unit});
  }
}

void Residency::release(UnitId unit, Actions& out) {
  UnitEntry& state = units_[unit];
  const Uses& uses = state.uses;
  const bool in_use = uses.active > 0 || uses.in_backward || uses.holds > 0 || uses.stays;
  if (state.releases && state.resident && !in_use) {
    end_residency(unit, /*late=*/uses.entered > 0 || uses.kept_for_backward, out);
  }
}

void Residency::release_all_but(const std::vector<UnitId>& keep, Actions& out) {
  for (UnitId unit = 0; releases_ && unit < static_cast<UnitId>(units_.size()); ++unit) {
    if (units_[unit].resident && std::find(keep.begin(), keep.end(), unit) == keep.end()) {
      release(unit, out);
    }
  }
}

void Residency::release_late(UnitId unit, Actions& out) {
  if (units_[unit].uses.entered == 0) {
    end_late(unit, out);
  }
}

void Residency::serve(UnitId unit, Actions& out) {
  UnitEntry& state = units_[unit];
  unshard(unit, out);
  if (state.releases && state.uses.active == 0 && state.uses.holds == 0 && !state.uses.stays) {
    end_residency(
        unit,
        /*late=*/state.uses.entered > 0 || state.uses.in_backward || state.uses.kept_for_backward,
        out);
  }
}

void Residency::leave_backward(UnitId unit, Actions& out) {
  units_[unit].uses.in_backward = false;
  units_[unit].uses.kept_for_backward = false;
  end_backward(unit);
  if (units_[unit].uses.entered == 0) { // else the backward runs inside a call of the unit
    end_late(unit, out);
  }
}

void Residency::invalidate(UnitId unit, Actions& out) {
  UnitEntry& state = units_[unit];
  end_stay(unit, out);
  if (!state.releases && state.gathers) {
    state.resident = false;
  }
}

void Residency::regather(UnitId unit, Actions& out) {
  UnitEntry& state = units_[unit];
  if (state.gathers) {
    state.resident = state.resident || !state.releases;
    out.push_back({ActionKind::Unshard, unit});
  }
}

void Residency::abort(Actions& out) {
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    end_late(unit, out);
    Uses& uses = units_[unit].uses;
    uses = {.holds = uses.holds};
  }
  release_all_but({}, out);
}

void Residency::hold_unsharded(UnitId unit, Actions& out) {
  ++units_[unit].uses.holds;
  unshard(unit, out);
}

void Residency::unshard_ahead(UnitId unit, Actions& out) {
  units_[unit].uses.stays = true;
  unshard(unit, out);
}

void Residency::end_stay(UnitId unit, Actions& out) {
  units_[unit].uses.stays = false;
  release(unit, out);
}

void Residency::release_unsharded(UnitId unit, Actions& out) {
  --units_[unit].uses.holds;
  release(unit, out);
}

} // namespace zerocore
