"""Which parameters have gradients, the same on all ranks, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zerocore.common.agreement import gather_objects
from zerocore.model.state import ShardState
from zerocore.tensor.rows import shard_of

Used = tuple[bool, ...]
"""For each parameter of an optimizer whether it has a gradient."""

Plan = TypeVar("Plan")
_KEPT_PLANS = 16  # of steps in which different parameters have gradients


def used_in_step(state: ShardState, name: str, params: Sequence[Any]) -> Used:
    """Which of the parameters have a gradient; all ranks must call. Blocks the host. A reduction
    gives all ranks that share a parameter the same ones. If they were set on some of these only, a
    ValueError on every rank names the parameter: they would exchange other matrices."""
    used = tuple(param.grad is not None for param in params)
    found = state.engine.any_rank([*used, *(not own for own in used)])
    for index, param in enumerate(params):
        if found[index] and found[len(used) + index]:
            _check_alike(state, name, param, used[index])
    return used


def _check_alike(state: ShardState, name: str, param: Any, used: bool) -> None:
    shard = shard_of(param)
    assert shard is not None
    answer = (state.ranks_of(shard.unit).members, used)
    answers = gather_objects(state.ranks.groups, [answer], state.device)
    if len(set(answers)) == len({members for members, _ in answers}):
        return
    having = [rank for rank, (_, has_grad) in enumerate(answers) if has_grad]
    lacking = [rank for rank, (_, has_grad) in enumerate(answers) if not has_grad]
    raise ValueError(
        f"{name}: parameter '{shard.fqn}' has a gradient on ranks {having} and none on "
        f"ranks {lacking}; set or clear gradients on all ranks alike"
    )


def plan_of(used: Used, plans: dict[Used, Plan], make: Callable[[], Plan]) -> Plan:
    """The plan of a step in which these have gradients, kept in ``plans`` or made."""
    if used not in plans:
        if len(plans) == _KEPT_PLANS:
            plans.clear()
        plans[used] = make()
    return plans[used]
