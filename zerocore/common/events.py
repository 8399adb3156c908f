"""Reads the runtime's trace: events, and when each collective had the link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerocore._C import TraceRecord

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


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


def read_events(records: Iterable[TraceRecord], names: Sequence[str]) -> list[Event]:
    """Events of the records that ``stop_trace`` returns; ``names`` are those of the units."""
    return [
        Event(
            record.op,
            names[record.unit],
            record.nbytes,
            record.pool_nbytes,
            record.issued_ns,
            record.done_ns,
            record.wait_ns,
        )
        for record in records
    ]


def transfers(events: Iterable[Event], *, queued: bool) -> Iterator[tuple[Event, int]]:
    """Each finished collective with the time it began to move bytes, ns.

    On a GPU that is when it was issued. On the host collectives are ``queued``: a link carries
    one at a time, and one that was issued before the last was done begins when that was done.
    """
    free_ns = 0
    for event in events:
        if event.op not in COLLECTIVES or event.done_ns < 0:
            continue
        begin_ns = max(event.issued_ns, free_ns) if queued else event.issued_ns
        yield event, min(begin_ns, event.done_ns)
        free_ns = event.done_ns
