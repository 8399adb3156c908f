// Finds out from a call's graph whether its backward reads the parameters of the call's unit.
//
// Note [Gathers that nobody reads]
// The backward of an embedding reads indices and no weight, so gathering the weight for it moves
// bytes for nothing. The reads of a backward are known for certain only where every node that the
// call recorded is of a known kind, and all that the nodes saved lies in other memory. All else
// counts as reading: nodes written in Python keep what they like (checkpoints make calls again),
// and so do hooks on saved tensors and on nodes. It follows from the graph alone; ranks compare it
// with their calls, see Note [One order on every rank].
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/graph/untracked_backward.h"
#include "engine/unit/unit.h"

namespace zerocore {

// The call of the unit gave `outputs`. True also where parameters stay.
bool may_read(
    const std::vector<at::Tensor>& outputs,
    const RecordedCall& recorded,
    const Unit& unit);

} // namespace zerocore
