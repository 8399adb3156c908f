"""Refuses a model whose plan exceeds a memory budget, and names the changes that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from zerocore.common.quantities import format_nbytes
from zerocore.model.config import ShardConfig
from zerocore.model.ranks import Ranks
from zerocore.model.units import UnitPlanned
from zerocore.planning.changes import Candidate, changes
from zerocore.planning.division import Division, parts_of
from zerocore.planning.planner import Precision, make_planner

NUM_CHANGES = 3


def check_budget(
    model: nn.Module,
    planned: list[UnitPlanned],
    config: ShardConfig,
    meshes: Sequence[Ranks],
    budget: int,
) -> None:
    """Raises ValueError if what zerocore and Adam would allocate on rank 0 exceeds ``budget``.

    Parameters, gradients, two optimizer states and the bucket pool, bytes; activations are not
    known before a forward and not counted. Rank 0 owns the most, so all ranks decide alike.
    """
    ranks = meshes[0]
    planner = make_planner(model, planned, Precision(mixed=config.mixed_precision))
    division = Division(
        config.stage,
        ranks.world_size,
        ranks.num_replicas,
        config.communication,
        backend=ranks.backend,
        offload=config.offload,
        parts=parts_of(meshes[1:]),
    )
    candidate = Candidate(planner, division)
    needed = candidate.nbytes
    if needed <= budget:
        return
    narrow = make_planner(model, planned, Precision(torch.bfloat16))
    less = changes(candidate, lambda nbytes: nbytes <= budget, narrow)
    fitting = list(islice((change for change in less if change.nbytes <= budget), NUM_CHANGES))
    lines = [
        f"memory_budget: stage {config.stage} on {division.ranks} needs {format_nbytes(needed)} "
        f"({needed:,} bytes) for parameters, gradients, the states of Adam and the bucket pool; "
        f"the budget is {format_nbytes(budget)} ({budget:,} bytes)."
    ]
    if fitting:
        lines.append("The cheapest changes that would fit:")
    else:
        lines.append("No change of stage, prefetch, dtype or ranks would fit; use smaller units.")
    lines += [
        f"- {change.text}: saves {format_nbytes(needed - change.nbytes)} "
        f"({needed - change.nbytes:,} bytes)"
        for change in fitting
    ]
    raise ValueError("\n".join(lines))
