// Of a unit's gradient scale, the factor that a step applies: see Note [Scale of gradients].
#pragma once

#include "engine/unit/unit.h"
#include "plan/grad_steps.h"

namespace zerocore {

double scale_of(const GradStep& step, const Unit& unit);

} // namespace zerocore
