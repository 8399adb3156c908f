"""Frozen copies of sharded models, as reference policies and target networks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from zerocore.model.state import ShardState, state_of
from zerocore.options.config import Communication
from zerocore.sharding.collect import shard_model
from zerocore.tensor.placed import local_of
from zerocore.weights.buckets import export

_Model = TypeVar("_Model", bound=nn.Module)


def clone_sharded(model: _Model, make: Callable[[], _Model] | None = None) -> _Model:
    """A frozen copy of a sharded model, in ``eval`` mode, sharded alike; all ranks call.

    No rank holds more than its shards of the copy: it is made on the meta device. It has no
    gradients, main weights or optimizer states.

    Args:
        make: makes a plain model of the same kind; by default ``type(model)(model.config)``, as
            models of ``transformers`` are made.

    Raises:
        ValueError: the model is not sharded, or by ``zerocore.fsdp``; has parts that only some
            ranks share; or what ``make`` has made has other parameters.
        TypeError: ``make`` is needed.
    """
    state = _flat_state_of(model)
    if len(state.meshes) > 1 or state.tensor_ranks is not None:
        raise ValueError("clone_sharded takes no model with groups= or tensor parallelism")
    if make is None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"clone_sharded({type(model).__name__}): pass make=, which makes a plain model of "
                "the same kind"
            )
        make = lambda: type(model)(model.config)  # noqa: E731
    with torch.device("meta"):
        copied = make().requires_grad_(False).eval()
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
    copy_weights(model, copied)
    return copied


def _buffers_of(source: nn.Module, target: nn.Module) -> Callable[[nn.Module], None]:
    """Gives a module of ``target`` the buffers of its twin in ``source``."""
    twins = dict(zip(target.modules(), source.modules(), strict=False))

    def fill(module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            given = twins[module]._buffers.get(name)
            if buffer is not None and given is not None:
                buffer.copy_(given)

    return fill


def _flat_state_of(model: nn.Module) -> ShardState:
    state = state_of(model)
    if state.kind.by_rows:
        raise ValueError(
            f"this {type(model).__name__} is sharded by {state.kind.face}, whose models cannot be "
            "clones or take weights from here: make a plain one, and call zerocore.shard"
        )
    return state


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives ``target`` the weights and buffers of ``source``, two sharded models; all ranks call.

    Each rank copies its elements where both lie alike; else ``source`` is exported.

    Raises:
        ValueError: one is not sharded, or they have other parameters; on all ranks, before anything
            is changed.
    """
    ours, theirs = state_of(source), _flat_state_of(target)
    params = {param.fqn: param for param in theirs.params()}
    own = {param.fqn: param for param in ours.params()}
    if {name: param.full.shape for name, param in own.items()} != {
        name: param.full.shape for name, param in params.items()
    }:
        odd = sorted(set(own) ^ set(params)) or sorted(own)
        raise ValueError(f"the two models have other parameters, such as '{odd[0]}'")
    theirs.finish_reads()
    if _layouts(ours) == _layouts(theirs):
        for name, param in params.items():
            local_of(param.shard).copy_(local_of(own[name].shard))
    else:
        for bucket in export(source):
            for name, value in bucket.items():
                if name in params:
                    shard = params[name].shard
                    local_of(shard).copy_(shard.place.part_of(shard.place.part_of_whole(value)))
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        buffer.copy_(buffers[name])


def _layouts(state: ShardState) -> list[object]:
    found: list[object] = []
    for unit in state.units:
        layout = state.engine.layout(unit.index)
        places = [(place.region, place.offset) for place in layout.places]
        found.append(
            (layout.by_rows, layout.num_shards, state.ranks_of(unit.index).members, places)
        )
    return found
