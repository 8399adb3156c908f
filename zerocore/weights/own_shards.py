"""Returns this rank's elements of each parameter, for programs that send shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerocore.model.state import ready_state_of
from zerocore.state_dict import param_keys
from zerocore.tensor.rows import elements_of
from zerocore.weights.info import place_in_unit


@dataclass(frozen=True)
class Shard:
    """This rank's elements of a parameter.

    Attributes:
        name: name in the state dict; the first one of a tied parameter.
        global_shape: shape of the full tensor.
        strides: strides of the full tensor, if elements are not in C order; else None.
        shard_range: ``(begin, end)`` of the elements in memory order; empty if this rank has none.
        rank: this rank in the model.
        tensor: the elements, 1-D, of the main weights if there are any. It shares their memory,
            unless ``zerocore.fsdp`` shards the parameter along another dimension than the first.
    """

    name: str
    global_shape: torch.Size
    strides: tuple[int, ...] | None
    shard_range: tuple[int, int]
    rank: int
    tensor: Tensor


def shards(model: nn.Module) -> list[Shard]:
    """Returns this rank's part of each parameter of a sharded model; communicates nothing.

    If a ``zerocore.fsdp`` model has run no forward, it first makes the engine, on all ranks.

    Raises:
        ValueError: the model is not sharded, or a parameter is a part of a larger tensor, as with
            ``groups=`` or tensor parallelism; the message names it.
    """
    state = ready_state_of(model)
    result = []
    for param, names in param_keys(model, state).items():
        place = place_in_unit(param)
        if place.part is not None:
            raise ValueError(f"'{param.fqn}' is a part of a larger tensor; use zerocore.export")
        elements = elements_of(param.shard, param.shard)
        facts = (place.global_shape, place.strides, place.shard_range, state.rank)
        result += [Shard(name, *facts, elements) for name in names[:1]]
    return result
