"""Frozen copies of sharded models, as reference policies and target networks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zerocore.model.state import ShardState, ready_state_of
from zerocore.options.config import Communication
from zerocore.sharding.collect import shard_model
from zerocore.tensor.rows import own_elements, part_like
from zerocore.weights.buckets import export

_Model = TypeVar("_Model", bound=nn.Module)


def clone_sharded(model: _Model, make: Callable[[], _Model] | None = None) -> _Model:
    """A frozen copy of a sharded model, in ``eval`` mode, sharded alike; all ranks call.

    No rank holds more than its shards of the copy: it is made on the meta device. It has no
    gradients, main weights or optimizer states, and lies on the device.

    Args:
        make: makes a plain model of the same kind; by default ``type(model)(model.config)``, as
            models of ``transformers`` are made.

    Raises:
        ValueError: the model is not sharded; has parts that only some ranks share, or parameters
            that gather themselves; or what ``make`` has made has other parameters.
        TypeError: ``make`` is needed.
    """
    state = ready_state_of(model)
    _check(state)
    if make is None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"clone_sharded({type(model).__name__}): pass make=, which makes a plain model of "
                "the same kind"
            )
        make = lambda: type(model)(model.config)  # noqa: E731
    with torch.device("meta"):
        copied = make().requires_grad_(False).eval()
    if state.kind.by_rows:
        from zerocore.weights.row_clones import shard_rows_alike  # late: imports torch's FSDP2

        shard_rows_alike(model, copied, state.device)
    else:
        _shard_alike(model, state, copied)
    copy_weights(model, copied)
    return copied


def _check(state: ShardState) -> None:
    if state.tensor_ranks is not None or (len(state.meshes) > 1 and not state.kind.by_rows):
        raise ValueError("clone_sharded takes no model with groups= or tensor parallelism")
    if state.extensions:
        raise ValueError(
            f"parameter '{state.extensions[0].fqn}' says itself what is gathered of it; "
            "clone_sharded takes no such parameters"
        )


def _shard_alike(model: nn.Module, state: ShardState, copied: nn.Module) -> None:
    given = state.config.communication
    communication = Communication(prefetch=given.prefetch, sync_buffers=given.sync_buffers)
    config = replace(state.config, communication=communication, sync_params=False, offload=None)
    shard_model(
        copied,
        lambda: config,
        state.given_ranks,
        units=state.given_units,
        device=state.device,
        init_fn=_buffers_of(model, copied),
    )


def _buffers_of(source: nn.Module, target: nn.Module) -> Callable[[nn.Module], None]:
    """Gives a module of ``target`` the buffers of its twin in ``source``."""
    twins = dict(zip(target.modules(), source.modules(), strict=False))

    def fill(module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            given = twins[module]._buffers.get(name)
            if buffer is not None and given is not None:
                buffer.copy_(given)

    return fill


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives ``target`` the weights and buffers of ``source``, two sharded models; all ranks call.

    Each rank copies its elements where both lie alike; else ``source`` is exported.

    Raises:
        ValueError: one is not sharded, or they have other parameters; on all ranks, before anything
            is changed.
    """
    ours, theirs = ready_state_of(source), ready_state_of(target)
    params = {param.fqn: param.shard for param in theirs.params()}
    own = {param.fqn: param.shard for param in ours.params()}
    beside, others = _beside(source, ours), _beside(target, theirs)
    lacking = others.keys() - beside.keys()
    if lacking or _shapes(ours) != _shapes(theirs):
        odd = sorted(own.keys() ^ params.keys() | lacking) or sorted(own)
        raise ValueError(f"the two models have other parameters, such as '{odd[0]}'")
    theirs.finish_reads()
    if _layouts(ours) == _layouts(theirs):
        for name, shard in params.items():
            own_elements(shard).copy_(own_elements(own[name], reads_only=True))
    else:
        for bucket in export(source):
            for name in bucket.keys() & params.keys():
                own_elements(params[name]).copy_(_own_part(params[name], bucket[name]))
    for name, value in others.items():
        value.copy_(beside[name])


def _shapes(state: ShardState) -> dict[str, torch.Size]:
    return {param.fqn: param.whole_shape for param in state.params()}


def _own_part(shard: Any, whole: Tensor) -> Tensor:
    if hasattr(shard, "_spec"):
        return part_like(shard, whole)
    part: Tensor = shard.place.part_of(shard.place.part_of_whole(whole))
    return part


def _beside(model: nn.Module, state: ShardState) -> dict[str, Tensor]:
    """Buffers, and parameters that ``fully_shard`` was told to ignore."""
    shards = {id(param.object) for param in state.params()}
    ignored = () if state.kind.has_all else model.named_parameters()
    found = {name: param for name, param in ignored if id(param) not in shards}
    return found | dict(model.named_buffers())


def _layouts(state: ShardState) -> list[object]:
    found: list[object] = []
    for unit in state.units:
        layout = state.engine.layout(unit.index)
        places = [(place.region, place.offset) for place in layout.places]
        params = [(param.fqn, getattr(param.shard, "placements", None)) for param in unit.params]
        members = state.ranks_of(unit.index).members
        found.append((layout.by_rows, layout.num_shards, members, places, params))
    return found
