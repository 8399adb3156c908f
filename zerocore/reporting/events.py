"""Reads the runtime's trace: its events, and when each collective used the link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerocore._C import TraceRecord
from zerocore.common.events import COLLECTIVES, EXCHANGE, GATHERS

HOST = ("to_host", "host_squares", "host_update", "to_device")
"""Operations of states on the host: gradients arrive, are squared for the norm, update weights, and
weights return."""
OPTIMIZER = "optimizer"
"""The name that the optimizer's events have instead of a unit's."""


@dataclass(frozen=True)
class Event:
    """One event of the runtime.

    Attributes:
        op: ``all_gather``, ``gather_near``, ``reduce_scatter``, ``all_reduce``, ``unshard`` or
            ``reshard``; ``gather_sums`` gathers gradients that ranks have summed in order; an
            optimizer of whole matrices has ``all_to_all``, and states on the host have
            ``to_host``, ``host_squares``, ``host_update`` and ``to_device``.
        unit: name of the unit, or ``optimizer``.
        nbytes: bytes of the full bucket; for an all-to-all, the bytes that this rank sends.
        pool_nbytes: bytes of the bucket pool in use right after the event.
        issued_ns: when it was issued, on a monotonic clock; on a GPU when it began there.
        done_ns: when it was done; -1 if unknown.
        wait_ns: exposed time, in which the host, or on a GPU the compute stream, waited for it.
    """

    op: str
    unit: str
    nbytes: int
    pool_nbytes: int
    issued_ns: int
    done_ns: int
    wait_ns: int


def read_events(records: Iterable[TraceRecord], names: Sequence[str]) -> list[Event]:
    """Reads the events of a trace's records; ``names``: the units' names."""
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
"""The queue of each operation, in which its collectives take turns; "" if not named."""
ONE_QUEUE: Queues = {}
"""On the host all collectives share one queue."""


def queues_of_device(own_reductions: bool) -> Queues:
    """Returns the queues on a GPU, on which the collectives of one communicator take turns.

    Sums over replicas and gathers from near ranks have their own, and so may reductions.
    """
    across = {"all_reduce": "across", "gather_near": "near"}
    reductions = dict.fromkeys(("reduce_scatter", "gather_sums", EXCHANGE), "own")
    return {**across, **reductions} if own_reductions else across


def transfers(events: Iterable[Event], queues: Queues) -> Iterator[tuple[Event, int]]:
    """Yields each finished collective with the time, in ns, at which it began to move bytes.

    An issued collective begins when the previous one of its queue is done. A gather also waits
    until its shard has come from the host.
    """
    free_ns: dict[str, int] = {}
    arrived_ns: dict[str, int] = {}  # when a unit's shard has come from the host
    for event in events:
        if event.op == "to_device":
            arrived_ns[event.unit] = event.done_ns
        if event.op not in (*COLLECTIVES, EXCHANGE) or event.done_ns < 0:
            continue
        queue = queues.get(event.op, "")
        ready_ns = arrived_ns.get(event.unit, 0) if event.op in GATHERS else 0
        begin_ns = max(event.issued_ns, free_ns.get(queue, 0), ready_ns)
        yield event, min(begin_ns, event.done_ns)
        free_ns[queue] = event.done_ns
