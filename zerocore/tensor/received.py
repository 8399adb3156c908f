"""The tensors that collectives of the program's own write to."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch.distributed import distributed_c10d

from zerocore.tensor.functions import Args, Function, Kwargs, name_of
from zerocore.tensor.placed import Placed, leaves

_SENDING = frozenset({"send", "isend"})  # these write to no tensor


def received_by(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Returns the tensors that a collective of ``torch.distributed`` writes to; no schema says."""
    if getattr(func, "__module__", "") != distributed_c10d.__name__:
        return ()
    name = name_of(func)
    if name in _SENDING:
        return ()
    position = int(name == "gather")  # its first argument is the tensor to send
    if position < len(args):
        return args[position]
    return kwargs.get(list(signature(func).parameters)[position], ())


def receives(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether a collective writes to shards."""
    return any(isinstance(t, Placed) for t in leaves(received_by(func, args, kwargs)))
