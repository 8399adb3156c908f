"""Patches helpers of ``torch.distributed.checkpoint`` to support shards.

Its plans ask every tensor for its chunks. Its helpers do not ask: without the patches, they copy,
gather and make states only for plain tensors and DTensors. ``zerocore.install`` has the table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.common.patching import around
from zerocore.hooks.optimizer_states import is_of_shards, unwrapped
from zerocore.tensor.placed import Placed, local_of
from zerocore.tensor.shard import as_shard


@around
def gathers(original: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
    """Gathers shards into full tensors, one after the other, for ``full_state_dict=True``."""
    only = options.get("ranks_only") or ()
    keep = not only or dist.get_rank(options.get("pg")) in only

    def full(value: Tensor) -> Tensor:
        if not isinstance(value, Placed):
            return value
        # Torch broadcasts a tensor's memory, whatever its strides.
        whole = value.whole_tensor().contiguous()
        if not keep:
            return torch.empty(0, device="cpu")
        return whole.cpu() if options.get("cpu_offload") else whole

    return original(tree_map_only(Tensor, full, state_dict), *args, **options)


@around
def makes_states(original: Any, optim: Any, *args: Any) -> Any:
    """Makes states of shards without a step; torch would take a step, and leave it counted."""
    if not is_of_shards(optim):
        return original(optim, *args)
    # Late: few programs save states before a step.
    from zerocore.hooks.first_states import make_until_step, note_added_options

    optim = unwrapped(optim)
    if not any(optim.state.values()):
        note_added_options(optim)
    return make_until_step(optim)


@around
def stages(original: Any, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Placed):
        return original(self, x, *args, **kwargs)
    local = original(self, local_of(x), *args, **kwargs)
    return as_shard(local, x.place.without_groups())  # another process may receive it


@around
def copies(original: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    places: list[Any] = []

    def unwrap(value: Tensor) -> Tensor:
        places.append(value.place if isinstance(value, Placed) else None)
        return local_of(value) if isinstance(value, Placed) else value

    copied = original(tree_map_only(Tensor, unwrap, state_dict), *args, **kwargs)
    remaining = iter(places)

    def wrap(value: Tensor) -> Tensor:
        place = next(remaining)
        return value if place is None else as_shard(value, place.without_groups())

    return tree_map_only(Tensor, wrap, copied)


@around
def refuses(original: Any, self: Any, plan: Any, planner: Any, *args: Any, **kwargs: Any) -> Any:
    state = getattr(planner, "state_dict", {})
    for item in plan.items:
        if isinstance(state.get(item.index.fqn), Placed):
            raise TypeError(
                f"HuggingFaceStorageWriter writes one piece of a tensor per file, and the shard "
                f"of '{item.index.fqn}' may be several. Call zerocore.save_safetensors(model, "
                "folder), which writes the same files"
            )
    return original(self, plan, planner, *args, **kwargs)


class _Part:
    """A part that shows the shape of its larger tensor, because load plans compare shapes."""

    def __init__(self, shard: Any) -> None:
        self._shape: torch.Size = shard.place.whole_shape
        self.__create_chunk_list__ = shard.__create_chunk_list__
        self.__create_write_items__ = shard.__create_write_items__
        self.__get_tensor_shard__ = shard.__get_tensor_shard__

    def size(self) -> torch.Size:
        return self._shape


@around
def plans(original: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    read: list[Any] = [value for value in state_dict.values() if isinstance(value, Placed)]
    torch.autograd.graph.increment_version(read)  # also on a rank whose part is empty
    shown = {
        key: _Part(value) if isinstance(value, Placed) and value.place.part else value
        for key, value in state_dict.items()
    }
    return original(shown, *args, **kwargs)
