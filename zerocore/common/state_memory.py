"""Memory of new optimizer states: zeros, or anything where a load is about to fill it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from zerocore._C import HostMemory

_LARGE_NBYTES = 1 << 20  # what is worth a mapping of its own
_is_filled = ContextVar("is_filled", default=False)


@contextmanager
def filled_later() -> Iterator[None]:
    """Inside, :func:`state_memory` leaves memory as it is; who asks for it fills or drops it."""
    token = _is_filled.set(True)
    try:
        yield
    finally:
        _is_filled.reset(token)


def state_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D memory of states that are zeros at first."""
    if not _is_filled.get():
        return torch.zeros(numel, dtype=dtype, device=device)
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE_NBYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    # Of large pages: to make those of 4 KiB takes about as long as to read what they are filled
    # with.
    return HostMemory(nbytes, inherited=True).view(0, numel, dtype)
