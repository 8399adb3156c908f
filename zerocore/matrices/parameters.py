"""Finds matrices in parameters: all, the ones Muon can update, the ones with gradients."""

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
    """Returns the entries of one group: parameters or ``(name, parameter)`` pairs."""
    return [params] if isinstance(params, Tensor) else list(params)


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Returns an optimizer's ``params`` as a list of groups; reads generators once."""
    listed: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": items_of(group["params"])} for group in listed]
    return [{"params": listed}]


def param_of(item: Item) -> Any:
    return item[1] if isinstance(item, tuple) else item


def check_sharded(
    groups: Iterable[Mapping[str, Any]], optimizer: str, known: ShardState | None = None
) -> ShardState:
    """Returns the state of the model; raises ValueError unless all parameters belong to one."""
    for number, item in enumerate(item for group in groups for item in group["params"]):
        shard = ready_shard_of(param_of(item))
        state = None if shard is None else shard.state_ref()
        if state is None or known not in (None, state):
            what = "belongs to another sharded model than the parameters before it"
            if state is None:
                what = "does not belong to a sharded model"
            raise ValueError(
                f"{optimizer}: {_label(item, number)} {what}; call zerocore.shard or "
                "zerocore.fsdp.fully_shard first and give each optimizer the parameters of one "
                "model"
            )
        known = state
    if known is None:
        raise ValueError(f"{optimizer} got no parameters; pass the parameters of a sharded model")
    if known.ranks.levels is not None:
        raise ValueError(
            f"{optimizer} does not support replicas_share='optimizer'; use "
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
    """A parameter, its shard, and its place in the full parameter."""

    param: Any
    shard: ShardedParameter | RowShard
    place: Place  # in the parameter that the ranks of its mesh share

    @staticmethod
    def of(param: Any) -> Whole:
        """Returns the entry of a parameter that belongs to an engine."""
        shard = shard_of(param)
        assert shard is not None
        place = own_place_of(param, shard) if isinstance(shard, RowShard) else shard.place
        return Whole(param, shard, place)

    @property
    def mesh(self) -> int:
        """The index of its mesh in the state's meshes."""
        return int(self.shard.state_ref().units[self.shard.unit].mesh)

    def elements(self, value: Any = None) -> Tensor:
        """Returns this rank's elements of the parameter, or of a value of its shape, 1-D."""
        return elements_of(self.param if value is None else value, self.param)


def name_of(param: Any) -> str:
    shard = shard_of(param)
    return "" if shard is None else shard.fqn


def full_shape(param: Any) -> torch.Size:
    """Returns the parameter's shape before sharding; a part of a ``ParameterMesh`` has its own."""
    return param.global_shape if isinstance(param, ShardedParameter) else param.shape


def check_has_whole_matrices(param: Any) -> None:
    """Raises ValueError if other ranks have other parts of the parameter's matrices."""
    stacks = len(full_shape(param)) == 3
    if any(dim != 0 or not stacks for dim in cuts_of(param)):
        raise ValueError(
            f"Muon: parameter '{name_of(param)}' of shape {tuple(full_shape(param))} is a part of "
            f"a larger tensor, cut along dimension {cuts_of(param)[0]} through its matrices. Muon "
            "takes whole matrices: cut a stack of them along dimension 0, or leave the parameter "
            "to AdamW with adamw_names="
        )


def check_is_whole(param: Any, optimizer: str) -> None:
    """Raises ValueError if the parameter is a part, and other ranks have the other parts."""
    if cuts_of(param):
        raise ValueError(
            f"{optimizer}: parameter '{name_of(param)}' is a part of a larger tensor, whose other "
            "parts are on other ranks, and an update may need all of it; use zerocore.optim.AdamW, "
            "or zerocore.matrices.Muon for a stack of matrices"
        )


def is_matrix(param: Any) -> bool:
    """Whether Muon can update the parameter: a matrix, or a stack of matrices as of experts."""
    return len(full_shape(param)) in (2, 3) and param.is_floating_point()


def checked_splits(split: Mapping[str, int] | None) -> dict[str, int]:
    """Checks ``split=``: numbers of matrices, by patterns of parameters' names."""
    splits = dict(split or {})
    for pattern, count in splits.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"split['{pattern}'] must be a positive integer, got {count!r}")
    return splits


def matrices_of(index: int, place: Place, steps: int, splits: Mapping[str, int]) -> list[Matrix]:
    """Returns the matrices of a parameter in memory order. The first pattern of ``splits`` that
    matches applies. Raises ValueError if it does not divide, or matrices are not contiguous."""
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
    # The orthogonalised transpose is the transpose of the result, so memory order suffices.
    laid = (columns, rows) if is_transposed else (rows, columns)
    cost = newton_schulz_cost(laid, steps)
    return [
        Matrix(index, begin, begin + numel, laid, cost, name)
        for begin in (range(0, total, numel) if numel else ())
    ]


def check_pattern(option: str, pattern: str, params: Sequence[Any]) -> None:
    """Raises ValueError if a pattern matches none of the matrices' names."""
    names = [name_of(param) for param in params]
    if not any(fnmatchcase(name, pattern) for name in names):
        raise ValueError(f"{option}: '{pattern}' matches no matrix; their names are {names[:8]}")


Used = tuple[bool, ...]
"""Whether each parameter of an optimizer has a gradient."""

Plan = TypeVar("Plan")
_KEPT_PLANS = 16  # one for each set of parameters with gradients


def used_in_step(state: ShardState, name: str, params: Sequence[Any]) -> Used:
    """Returns which parameters have a gradient; collective, and waits on the host. Reductions set
    gradients on all ranks that share a parameter. If only some of them have one, every rank raises
    a ValueError that names the parameter, as the ranks would exchange different matrices."""
    used = tuple(param.grad is not None for param in params)
    answers = state.engine.any_rank([*used, *(not has_grad for has_grad in used)])
    for index, param in enumerate(params):
        if answers[index] and answers[len(used) + index]:
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
    """Returns the plan of a step in which these have gradients; makes it if ``plans`` lacks it."""
    if used not in plans:
        if len(plans) == _KEPT_PLANS:
            plans.clear()
        plans[used] = make()
    return plans[used]
