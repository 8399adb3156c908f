"""A program's own collectives and hooks, in FSDP2's interface, as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.fsdp.group import Group


def on_stream(hook: Callable[[Tensor], None], stream: Any) -> Callable[[Tensor], None]:
    """Runs ``hook`` on ``stream``, ordered after earlier work and before later work."""

    def hooked(reduced: Tensor) -> None:
        module = torch.get_device_module(reduced.device)
        current = module.current_stream()
        stream.wait_stream(current)
        with module.stream(stream):
            hook(reduced)
        current.wait_stream(stream)

    return hooked


def gather_by(comm: Any, group: Group) -> Callable[[Tensor, Tensor], Any]:
    options = _options(group)

    def gather(to: Tensor, own: Tensor) -> Any:
        dtypes = {group.policy.param_dtype or param.shard.dtype for param in group.params}
        # As in torch: bytes for several dtypes.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        return comm(output_tensor=to.view(dtype), input_tensor=own.view(dtype), **options)

    return gather


def reduce_by(comm: Any, group: Group) -> Callable[[Tensor, Tensor], Any]:
    options = _options(group)

    def reduce(to: Tensor, full: Tensor) -> Any:
        return comm(output_tensor=to, input_tensor=full, op=dist.ReduceOp.SUM, **options)

    return reduce


def _options(group: Group) -> dict[str, Any]:
    """Returns the group, and ``async_op``: a device's stream keeps the order without a handle."""
    mesh = group.mesh
    return {"group": mesh.get_group(mesh.ndim - 1), "async_op": mesh.device_type == "cpu"}
