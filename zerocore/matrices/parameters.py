"""Which matrices a parameter holds, what of a group Muon may update, and which have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from zerocore.common.agreement import gather_objects
from zerocore.layout.boxes import memory_order
from zerocore.layout.place import Place
from zerocore.matrices.ownership import Matrix, newton_schulz_cost
from zerocore.model.state import ShardState
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import (
    RowShard,
    cuts_of,
    elements_of,
    own_place_of,
    ready_shard_of,
    shard_of,
)

Item = Tensor | tuple[str, Tensor]


def items_of(params: Any) -> list[Item]:
    """The entries of one group: parameters or ``(name, parameter)`` pairs."""
    return [params] if isinstance(params, Tensor) else list(params)


def groups_of(params: Any) -> list[dict[str, Any]]:
    """The argument of an optimizer as a list of groups; generators are read once."""
    listed: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": items_of(group["params"])} for group in listed]
    return [{"params": listed}]


def param_of(item: Item) -> Any:
    return item[1] if isinstance(item, tuple) else item


def check_sharded(
    groups: Iterable[Mapping[str, Any]], optimizer: str, known: ShardState | None = None
) -> ShardState:
    """The state of the one model whose parameters these are; raises ValueError."""
    for number, item in enumerate(item for group in groups for item in group["params"]):
        shard = ready_shard_of(param_of(item))
        state = None if shard is None else shard.state_ref()
        if state is None or known not in (None, state):
            what = "belongs to another sharded model than those before it"
            if state is None:
                what = "is no parameter of a sharded model"
            raise ValueError(
                f"{optimizer}: {_label(item, number)} {what}; call zerocore.shard or "
                "zerocore.fsdp.fully_shard first and give each optimizer the parameters of one "
                "model"
            )
        known = state
    if known is None:
        raise ValueError(f"{optimizer} got no parameters")
    if known.ranks.levels is not None:
        raise ValueError(
            f"{optimizer}: its exchange is not built for replicas_share='optimizer'; use "
            "zerocore.optim.AdamW, or leave replicas_share out"
        )
    return known


def _label(item: Item, number: int) -> str:
    param = param_of(item)
    if (shard := shard_of(param)) is not None:
        return f"parameter '{shard.fqn}'"
    name = f" '{item[0]}'" if isinstance(item, tuple) else f" {number}"
    shape = f" of shape {tuple(param.shape)}" if isinstance(param, Tensor) else f" ({param!r})"
    return f"parameter{name}{shape}"


@dataclass(frozen=True)
class Whole:
    """A parameter whose full value, or whose matrices, one rank gets."""

    param: Any
    shard: ShardedParameter | RowShard
    place: Place  # in what the ranks of its mesh share

    @staticmethod
    def of(param: Any) -> Whole:
        """Of a parameter that an engine has."""
        shard = shard_of(param)
        assert shard is not None
        place = own_place_of(param, shard) if isinstance(shard, RowShard) else shard.place
        return Whole(param, shard, place)

    @property
    def mesh(self) -> int:
        """The ranks that share it, by number in the state."""
        return int(self.shard.state_ref().units[self.shard.unit].mesh)

    def elements(self, value: Any = None) -> Tensor:
        """This rank's elements of the parameter, or of a value of its shape, 1-D."""
        return elements_of(self.param if value is None else value, self.param)


def name_of(param: Any) -> str:
    shard = shard_of(param)
    return "" if shard is None else shard.fqn


def full_shape(param: Any) -> torch.Size:
    """As one process has it, but for the parts of :class:`zerocore.ParameterMesh`."""
    return param.global_shape if isinstance(param, ShardedParameter) else param.shape


def check_has_whole_matrices(param: Any) -> None:
    """Raises ValueError if other ranks have other parts of its matrices."""
    stacks = len(full_shape(param)) == 3
    if any(dim != 0 or not stacks for dim in cuts_of(param)):
        raise ValueError(
            f"Muon: parameter '{name_of(param)}' of shape {tuple(full_shape(param))} is a part of "
            f"a larger tensor along dimension {cuts_of(param)[0]}, which cuts matrices, and Muon "
            "takes whole ones: parts of a stack of matrices along dimension 0. Leave it to AdamW "
            "with adamw_names="
        )


def check_is_whole(param: Any, optimizer: str) -> None:
    """Raises ValueError if ranks have parts of it that are parameters themselves."""
    if cuts_of(param):
        raise ValueError(
            f"{optimizer}: parameter '{name_of(param)}' is a part of a larger tensor, whose other "
            "parts are on other ranks, and an update may need all of it; use zerocore.optim.AdamW, "
            "or zerocore.matrices.Muon for a stack of matrices"
        )


def is_matrix(param: Any) -> bool:
    """Whether Muon can update it: a matrix, or a stack of them as of experts."""
    return len(full_shape(param)) in (2, 3) and param.is_floating_point()


def checked_splits(split: Mapping[str, int] | None) -> dict[str, int]:
    """How many matrices lie below each other in a parameter, by patterns of names."""
    splits = dict(split or {})
    for pattern, count in splits.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"split['{pattern}'] must be a positive integer, got {count!r}")
    return splits


def matrices_of(index: int, place: Place, steps: int, splits: Mapping[str, int]) -> list[Matrix]:
    """The matrices of the ``index``-th parameter in the order of its memory; ValueError if they do
    not lie one after the other, or the split, of the first pattern that fits, does not divide."""
    name, shape = place.fqn, tuple(place.global_shape)
    count = next((n for pattern, n in splits.items() if fnmatchcase(name, pattern)), 1)
    rows, columns = shape[-2:]
    order = memory_order(shape, place.strides)
    if len(shape) == 3 and order[0] != 0:
        raise ValueError(
            f"parameter '{name}' of shape {shape} is a stack whose matrices do not lie "
            f"one after the other in memory (strides {place.strides}); make it contiguous"
        )
    is_transposed = order[-1] != len(shape) - 1
    if rows % count or (count > 1 and is_transposed):
        raise ValueError(
            f"split: parameter '{name}' of shape {shape} has {rows} rows"
            f"{' (columns first in memory)' if is_transposed else ''}, which cannot be cut "
            f"into {count} matrices"
        )
    rows //= count
    numel, total = rows * columns, place.global_shape.numel()
    # Orthogonalising a transpose gives the transpose, so the order in memory will do.
    laid = (columns, rows) if is_transposed else (rows, columns)
    cost = newton_schulz_cost(laid, steps)
    return [
        Matrix(index, begin, begin + numel, laid, cost, name)
        for begin in (range(0, total, numel) if numel else ())
    ]


def check_pattern(option: str, pattern: str, params: Sequence[Any]) -> None:
    """Raises ValueError if a pattern of names fits none of the matrices."""
    names = [name_of(param) for param in params]
    if not any(fnmatchcase(name, pattern) for name in names):
        raise ValueError(f"{option}: '{pattern}' fits the name of no matrix; they are {names[:8]}")


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
