"""Memory of new optimizer states: zeros, or anything where a load is about to fill it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

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
    make = torch.empty if _is_filled.get() else torch.zeros
    return make(numel, dtype=dtype, device=device)
