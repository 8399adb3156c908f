"""Which matrices a parameter holds, and what of a group of parameters Muon may update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from zerocore.checkpoint.slices.boxes import memory_order
from zerocore.model.state import ShardState
from zerocore.planning.ownership import Matrix, newton_schulz_cost
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import shard_of

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
    number = 0
    for group in groups:
        for item in group["params"]:
            param = param_of(item)
            if hasattr(param, "_spec"):
                raise ValueError(
                    f"{optimizer}: {_label(item, number)} is a DTensor; {optimizer} sends whole "
                    "matrices between the ranks of a model of zerocore.shard. Shard the model with "
                    "zerocore.shard, or use torch.optim.Muon, which gathers DTensors by itself"
                )
            state = param.state_ref() if isinstance(param, ShardedParameter) else None
            if state is None or known not in (None, state):
                what = (
                    "is no parameter of a sharded model"
                    if state is None
                    else ("belongs to another sharded model than those before it")
                )
                raise ValueError(
                    f"{optimizer}: {_label(item, number)} {what}; call zerocore.shard first and "
                    "give each optimizer the parameters of one model"
                )
            known = state
            number += 1
    if known is None:
        raise ValueError(f"{optimizer} got no parameters")
    return known


def _label(item: Item, number: int) -> str:
    param = param_of(item)
    if (shard := shard_of(param)) is not None:
        return f"parameter '{shard.fqn}'"
    name = f" '{item[0]}'" if isinstance(item, tuple) else f" {number}"
    shape = f" of shape {tuple(param.shape)}" if isinstance(param, Tensor) else f" ({param!r})"
    return f"parameter{name}{shape}"


def check_of_all_ranks(param: ShardedParameter, name: str) -> None:
    """Raises ValueError if only some of the model's ranks share the parameter."""
    if param.state_ref().units[param.unit].mesh or param.place.part is not None:
        advice = "; leave it to AdamW with adamw_names=" if name == "Muon" else ""
        raise ValueError(
            f"{name}: parameter '{param.fqn}' is shared by some ranks of the model (groups=), and "
            f"matrices move among all of them{advice}"
        )


def is_matrix(param: ShardedParameter) -> bool:
    """Whether Muon can update it: a matrix, or a stack of them as of experts."""
    return len(param.global_shape) in (2, 3) and param.is_floating_point()


class Splits:
    """How many matrices lie below each other in a parameter, by patterns of names."""

    def __init__(self, split: Mapping[str, int] | None) -> None:
        self._split = dict(split or {})
        for pattern, count in self._split.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"split['{pattern}'] must be a positive integer, got {count!r}")

    def count(self, param: ShardedParameter) -> int:
        """The first pattern that fits says it; 1 by default."""
        for pattern, count in self._split.items():
            if fnmatchcase(param.fqn, pattern):
                return count
        return 1

    def check_used(self, params: Sequence[ShardedParameter]) -> None:
        """Raises ValueError if a pattern fits no matrix."""
        for pattern in self._split:
            check_pattern("split", pattern, params)

    def matrices(self, index: int, param: ShardedParameter, steps: int) -> list[Matrix]:
        """The matrices of the ``index``-th parameter in the order of its memory; ValueError if they
        do not lie one after the other, or the split does not divide."""
        count, shape = self.count(param), tuple(param.global_shape)
        rows, columns = shape[-2:]
        order = memory_order(shape, param.place.strides)
        if len(shape) == 3 and order[0] != 0:
            raise ValueError(
                f"parameter '{param.fqn}' of shape {shape} is a stack whose matrices do not lie "
                f"one after the other in memory (strides {param.place.strides}); make it contiguous"
            )
        is_transposed = order[-1] != len(shape) - 1
        if rows % count or (count > 1 and is_transposed):
            raise ValueError(
                f"split: parameter '{param.fqn}' of shape {shape} has {rows} rows"
                f"{' (columns first in memory)' if is_transposed else ''}, which cannot be cut "
                f"into {count} matrices"
            )
        rows //= count
        numel, total = rows * columns, param.global_shape.numel()
        # Orthogonalising a transpose gives the transpose, so the order in memory will do.
        laid = (columns, rows) if is_transposed else (rows, columns)
        cost = newton_schulz_cost(laid, steps)
        return [
            Matrix(index, begin, begin + numel, laid, cost, param.fqn)
            for begin in (range(0, total, numel) if numel else ())
        ]


def check_pattern(option: str, pattern: str, params: Sequence[ShardedParameter]) -> None:
    """Raises ValueError if a pattern of names fits none of the matrices."""
    if not any(fnmatchcase(param.fqn, pattern) for param in params):
        raise ValueError(
            f"{option}: '{pattern}' fits the name of no matrix; they are "
            f"{[param.fqn for param in params][:8]}"
        )
