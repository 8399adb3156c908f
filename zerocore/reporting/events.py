"""Reads the runtime's trace: events, and when each collective had the link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerocore._C import TraceRecord
from zerocore.common.events import COLLECTIVES, EXCHANGE, GATHERS

HOST = ("to_host", "host_squares", "host_update", "to_device")
"""Those of states on the host: gradients come, are squared for their norm, weights are updated, and
go back."""
OPTIMIZER = "optimizer"
"""Such events have it in the place of a unit's name."""


@dataclass(frozen=True)
class Event:
    """One thing the runtime did.

    Attributes:
        op: ``all_gather``, ``gather_near``, ``reduce_scatter``, ``all_reduce``, ``unshard`` or
            ``reshard``; ``gather_sums``, of gradients that ranks have summed in order; or
            ``all_to_all``, of an optimizer of whole matrices, and ``to_host``, ``host_squares``,
            ``host_update``, ``to_device``, of states on the host.
        unit: name of the unit, or ``optimizer``.
        nbytes: bytes of the full bucket; of an all-to-all those that this rank sends.
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
    """Events of the records of a trace; ``names`` are those of the units."""
    return [
        Event(
            record.op,
            OPTIMIZER if record.unit < 0 else names[record.unit],
            record.nbytes,
            record.pool_nbytes,
            record.issued_ns,
            record.done_ns,
            record.wait_ns,
        )
        for record in records
    ]


Queues = Mapping[str, str]
"""The names of the queues in which collectives take turns, by operation; "" for those not named."""
ONE_QUEUE: Queues = {}
"""On the host."""


def queues_of_device(own_reductions: bool) -> Queues:
    """On a GPU collectives of one communicator take turns.

    Sums over replicas and gathers from near ranks have one of their own, and so may reductions.
    """
    across = {"all_reduce": "across", "gather_near": "near"}
    own = dict.fromkeys(("reduce_scatter", "gather_sums", EXCHANGE), "own")
    return {**across, **own} if own_reductions else across


def transfers(events: Iterable[Event], queues: Queues) -> Iterator[tuple[Event, int]]:
    """Each finished collective with the time it began to move bytes, ns.

    One that was issued before the last of its queue was done begins when that was done. A gather
    begins when what it sends has come from the host.
    """
    free_ns: dict[str, int] = {}
    there_ns: dict[str, int] = {}  # by unit
    for event in events:
        if event.op == "to_device":
            there_ns[event.unit] = event.done_ns
        if event.op not in (*COLLECTIVES, EXCHANGE) or event.done_ns < 0:
            continue
        queue = queues.get(event.op, "")
        ready_ns = there_ns.get(event.unit, 0) if event.op in GATHERS else 0
        begin_ns = max(event.issued_ns, free_ns.get(queue, 0), ready_ns)
        yield event, min(begin_ns, event.done_ns)
        free_ns[queue] = event.done_ns
