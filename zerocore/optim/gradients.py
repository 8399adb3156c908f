"""Which parameters have gradients, the same on all ranks, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from zerocore.common.agreement import gather_objects
from zerocore.model.state import ShardState
from zerocore.tensor.parameter import ShardedParameter

Used = tuple[bool, ...]
"""For each parameter of an optimizer whether it has a gradient."""

Plan = TypeVar("Plan")
_KEPT_PLANS = 16  # of steps in which different parameters have gradients


def used_in_step(state: ShardState, name: str, params: Sequence[ShardedParameter]) -> Used:
    """Which of the parameters have a gradient; all ranks must call. Blocks the host. A reduction
    gives all ranks the same ones. If they were set on some ranks only, a ValueError on every rank
    names the parameter: the ranks would exchange other matrices than each other."""
    used = tuple(param.grad is not None for param in params)
    found = state.engine.any_rank([*used, *(not own for own in used)])
    for index, param in enumerate(params):
        if found[index] and found[len(used) + index]:
            answers = gather_objects(state.ranks.groups, [used[index]], state.device)
            having = [rank for rank, has_grad in enumerate(answers) if has_grad]
            lacking = [rank for rank, has_grad in enumerate(answers) if not has_grad]
            raise ValueError(
                f"{name}: parameter '{param.fqn}' has a gradient on ranks {having} and none on "
                f"ranks {lacking}; set or clear gradients on all ranks alike"
            )
    return used


def plan_of(used: Used, plans: dict[Used, Plan], make: Callable[[], Plan]) -> Plan:
    """The plan of a step in which these have gradients, kept in ``plans`` or made."""
    if used not in plans:
        if len(plans) == _KEPT_PLANS:
            plans.clear()
        plans[used] = make()
    return plans[used]
