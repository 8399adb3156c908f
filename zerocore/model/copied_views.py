"""Views of larger tensors that programs have set parameters and gradients to.

In plain torch ``p.data = view`` makes a parameter part of the larger tensor: a change of either
changes the other. A shard copies the view, so a program that then works through the larger tensor
would train wrong. It gets an error before a forward or backward in which the two would differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerocore.common.agreement import checksum
from zerocore.model.state import ShardState
from zerocore.tensor.noted_writes import copied_views
from zerocore.tensor.parameter import ShardedGrad
from zerocore.tensor.rows import shard_of


@dataclass
class CopiedView:
    """A view whose values a shard took, and what both were then. It keeps no memory."""

    storage: StorageWeakRef
    dtype: torch.dtype
    geometry: tuple[int, torch.Size, tuple[int, ...]]  # offset, shape, strides
    values: int  # a checksum
    version: int | None  # of the parameter; if it had no engine, in the first forward

    def has_other_values(self) -> bool:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return False
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return int(checksum(view.set_(storage, *self.geometry))) != self.values


def view_of(copy: Any, value: Tensor) -> CopiedView:
    """Returns what is kept of the view ``value``, which a parameter or gradient has copied."""
    shard = None if isinstance(copy, ShardedGrad) else shard_of(copy)
    state = None if shard is None else shard.state_ref()
    version = None
    if shard is not None and state is not None:
        version = state.engine.param_version(shard.unit, shard.position)
    geometry = (int(value.storage_offset()), value.shape, value.stride())
    storage = StorageWeakRef(value.untyped_storage())
    return CopiedView(storage, value.dtype, geometry, int(checksum(value)), version)


def check_weights(state: ShardState) -> None:
    """Checks before a forward that parameters and the views that they were set to are equal.

    Raises:
        RuntimeError: one of them has changed since.
    """
    for unit in state.units:
        for position, param in enumerate(unit.params):
            view = _living(param.object)
            if view is None:
                continue
            version = state.engine.param_version(unit.index, position)
            if view.version is None:
                view.version = version
            if view.version != version or view.has_other_values():
                raise RuntimeError(
                    f"parameter '{param.fqn}' was set to a view of a larger tensor, and one of the "
                    f"two has changed since: {_advice(state, '.data')}"
                )


def check_grads(states: Iterable[ShardState], roots: Iterable[Any]) -> None:
    """Checks before a backward from ``roots`` that it will add to no gradient that was set to a
    view.

    Raises:
        RuntimeError: it will, and the larger tensor still exists.
    """
    params = [(state, param) for state in states for param in state.params()]
    watched = [each for each in params if _living(each[1].object.grad) is not None]
    reached = _leaves_of(roots) if watched else set()
    for state, param in watched:
        if id(param.full) in reached:
            raise RuntimeError(
                f".grad of parameter '{param.fqn}' was set to a view of a larger tensor, and a "
                f"backward would change only one of the two: {_advice(state, '.grad')}. Or drop "
                "it before the backward, with zero_grad()"
            )


def _leaves_of(roots: Iterable[Any]) -> set[int]:
    """Returns the ids of the tensors into which a backward from ``roots`` accumulates gradients."""
    nodes: list[Any] = [getattr(root, "grad_fn", root) for root in roots]
    seen, found = set(), set()
    while nodes:
        node = nodes.pop()
        if node in seen or not hasattr(node, "next_functions"):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found


def _living(shard: Any) -> CopiedView | None:
    view: CopiedView | None = None if shard is None else copied_views.get(shard)
    if view is not None and view.storage.expired():
        del copied_views[shard]  # later passes need not look again
        return None
    return view


def _advice(state: ShardState, what: str) -> str:
    return (
        f"at stage {state.config.stage} {what} = view copies the values, and neither follows the "
        f"other. If the program uses the larger tensor no more, set {what} = view.clone(); if it "
        f"works through it, use stage=0 without main weights and offload, where {what} is the view"
    )
