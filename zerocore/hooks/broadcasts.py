"""Refuses the broadcast of a module's states where they are shards, which ranks would lose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch.distributed

from zerocore.tensor.place import Placed

_WRAPPED = "_zerocore_wrapped"


def refuse_broadcasts() -> None:
    """From now on torch refuses to broadcast lists that hold shards, before anything is sent; once.

    Other collectives of shards are refused by their rules. This one, with which wrappers and
    trainers give all ranks the module of rank 0, goes past them.
    """
    dist: Any = torch.distributed
    send = dist._broadcast_coalesced
    if hasattr(send, _WRAPPED):
        return

    @wraps(send)
    def check_first(group: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, Placed) and tensor.place.group is not None:
                raise TypeError(
                    f"broadcast of the shard of '{tensor.place.fqn}': each rank holds other "
                    "elements and would lose them. zerocore.shard has given all ranks the values "
                    "of rank 0; leave the broadcast out, or where a trainer does it use "
                    "zerocore.integrations (transformers, accelerate, lightning)"
                )
        return send(group, tensors, *args, **kwargs)

    setattr(check_first, _WRAPPED, True)
    dist._broadcast_coalesced = check_first
