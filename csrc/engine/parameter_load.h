// Brings this rank's part of a region from the host to its place in the gathered unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <future>
#include <string>
#include <vector>

#include "engine/unit_context.h"

namespace zerocore {

// `to` and `from` are 1-D bytes; `after`, if it is valid, is ready when `from` has its values. Over
// the emulated link the load is under way when this returns, and what is returned is ready when it
// is done; the host waits for that where a gather follows that cannot. A device copies on the
// stream of the gather.
std::shared_future<void> load_parameters(
    const UnitContext& context,
    UnitId unit,
    const std::string& name,
    const at::Tensor& to,
    const at::Tensor& from,
    const std::shared_future<void>& after);
// Empties the list.
void wait_for_all(std::vector<std::shared_future<void>>& loads);

} // namespace zerocore
