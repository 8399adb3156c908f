"""Makes frozen copies of sharded models, such as reference policies and target networks."""

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
    """Makes a frozen copy of a sharded model, in ``eval`` mode, sharded alike; all ranks call it.

    The copy is made on the meta device, so a rank never holds more than its shards. It has no
    gradients, main weights or optimizer states, and is on the device.

    Args:
        make: makes a plain model of the same kind; by default ``type(model)(model.config)``, as
            for models of ``transformers``.

    Raises:
        ValueError: the model is not sharded; it has parts that only some ranks share, or parameters
            that gather themselves; or the model from ``make`` has different parameters.
        TypeError: ``make`` is needed.
    """
    state = ready_state_of(model)
    _check(state)
    if make is None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"clone_sharded({type(model).__name__}): pass make=, a function that makes a plain "
                "model of the same kind"
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
        raise ValueError("clone_sharded does not support groups= or tensor parallelism")
    if state.extensions and not state.kind.by_rows:
        raise ValueError(
            f"parameter '{state.extensions[0].fqn}' gathers itself, which clone_sharded does not "
            "support"
        )


def _shard_alike(model: nn.Module, state: ShardState, copied: nn.Module) -> None:
    options = state.config.communication
    communication = Communication(prefetch=options.prefetch, sync_buffers=options.sync_buffers)
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
    """Returns a function that copies to a module of ``target`` its twin's buffers in ``source``."""
    twins = dict(zip(target.modules(), source.modules(), strict=False))

    def fill(module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            original = twins[module]._buffers.get(name)
            if buffer is not None and original is not None:
                buffer.copy_(original)

    return fill


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies weights and buffers from ``source`` to ``target``, two sharded models; all ranks call.

    Each rank copies its elements if both have the same layout; else it exports ``source``.

    Raises:
        ValueError: one is not sharded, or their parameters differ; on all ranks, before anything is
            changed.
    """
    source_state, target_state = ready_state_of(source), ready_state_of(target)
    from_params = {param.fqn: param.shard for param in source_state.params()}
    to_params = {param.fqn: param.shard for param in target_state.params()}
    from_plain, to_plain = _unsharded(source, source_state), _unsharded(target, target_state)
    lacking = to_plain.keys() - from_plain.keys()
    if lacking or _shapes(source_state) != _shapes(target_state):
        odd = sorted(from_params.keys() ^ to_params.keys() | lacking) or sorted(from_params)
        raise ValueError(f"the two models have different parameters, such as '{odd[0]}'")
    target_state.finish_reads()
    if _layouts(source_state) == _layouts(target_state):
        for name, shard in to_params.items():
            own_elements(shard).copy_(own_elements(from_params[name], reads_only=True))
    else:
        for bucket in export(source):
            for name in bucket.keys() & to_params.keys():
                own_elements(to_params[name]).copy_(_own_part(to_params[name], bucket[name]))
    for name, value in to_plain.items():
        value.copy_(from_plain[name])


def _shapes(state: ShardState) -> dict[str, torch.Size]:
    return {param.fqn: param.whole_shape for param in state.params()}


def _own_part(shard: Any, whole: Tensor) -> Tensor:
    if hasattr(shard, "_spec"):
        return part_like(shard, whole)
    part: Tensor = shard.place.part_of(shard.place.part_of_whole(whole))
    return part


def _unsharded(model: nn.Module, state: ShardState) -> dict[str, Tensor]:
    """Returns the buffers, and parameters that ``fully_shard`` ignores."""
    shards = {id(param.object) for param in state.params()}
    named = () if state.kind.has_all else model.named_parameters()
    ignored = {name: param for name, param in named if id(param) not in shards}
    return ignored | dict(model.named_buffers())


def _layouts(state: ShardState) -> list[object]:
    layouts: list[object] = []
    for unit in state.units:
        layout = state.engine.layout(unit.index)
        places = [(place.region, place.offset) for place in layout.places]
        params = [(param.fqn, getattr(param.shard, "placements", None)) for param in unit.params]
        members = state.ranks_of(unit.index).members
        layouts.append((layout.by_rows, layout.num_shards, members, places, params))
    return layouts
