"""Collectives of the program's own that write to shards: they see full values, whose parts are
copied back."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from zerocore.tensor.functions import Args, Function, Kwargs, name_of
from zerocore.tensor.placed import Placed, leaves, local_of
from zerocore.tensor.received import received_by

# After these, the same values are on all ranks of the group.
_GIVING_ALL = frozenset({"all_reduce", "all_reduce_coalesced", "broadcast"})


def receive(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a collective with full values, and copies the new ones to the shards.

    Raises TypeError if ranks of a shard would have other values, before it communicates.
    """
    written = [*leaves(received_by(func, args, kwargs))]
    group = signature(func).bind_partial(*args, **kwargs).arguments.get("group")
    for shard in written:
        if isinstance(shard, Placed):
            _check(name_of(func), shard, dist.group.WORLD if group is None else group)
    full = tree_map_only(Placed, lambda shard: shard.place.gather(local_of(shard)), (args, kwargs))
    output = func(*full[0], **full[1])
    if hasattr(output, "wait"):  # async_op=True
        output.wait()
    with torch.no_grad(), torch._C._EnableTorchFunction():
        for shard, value in zip(written, leaves(received_by(func, *full)), strict=True):
            if isinstance(shard, Placed):
                shard.copy_(value)  # type: ignore[attr-defined]
    return output


def _check(name: str, shard: Placed, group: Any) -> None:
    held = {rank for each in shard.place.groups for rank in dist.get_process_group_ranks(each)}
    if not held:
        return
    what = f"{name}() would write to {shard.what} '{shard.fqn}'"
    if name not in _GIVING_ALL:
        raise TypeError(
            f"{what} other values on each rank, and each rank keeps a part of it. Receive into a "
            "plain tensor, give all ranks the same values (dist.broadcast), and copy these: "
            "parameter.copy_(value)"
        )
    members = set(dist.get_process_group_ranks(group))
    if not held <= members or group in distributed_c10d._world.pg_coalesce_state:
        raise TypeError(
            f"{what} on ranks {sorted(members)} alone, or coalesced, and ranks {sorted(held)} hold "
            "parts of it: call it on all of these, by itself"
        )
