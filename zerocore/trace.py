"""Reads the runtime's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from zerocore.state import state_of


@dataclass(frozen=True)
class Event:
    """One thing the runtime did.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``unshard`` or ``reshard``.
        unit: name of the unit.
        nbytes: bytes of the full bucket.
        pool_nbytes: bytes of the bucket pool in use right after.
        issued_ns: when it was issued, on a monotonic clock; on a GPU when it began there.
        done_ns: when it was done; -1 where that is not known.
        wait_ns: exposed time: the host, on a GPU the compute stream, stood still for it.
    """

    op: str
    unit: str
    nbytes: int
    pool_nbytes: int
    issued_ns: int
    done_ns: int
    wait_ns: int


@contextmanager
def record_events(model: nn.Module) -> Iterator[list[Event]]:
    """Records what the runtime does; the list is filled when the block ends."""
    state = state_of(model)
    events: list[Event] = []
    state.engine.start_trace()
    try:
        yield events
    finally:
        for op, unit, *figures in state.engine.stop_trace():
            events.append(Event(op, state.units[unit].name, *figures))
