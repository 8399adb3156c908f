"""Replays a log of hand-overs with vector clocks and names the first race."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zerocore._C import HandOver

Clock = dict[str, int]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
PAGE_NBYTES = 512  # accesses are kept by the pages that they touch


@dataclass(frozen=True)
class Access:
    """One access: the `index`-th of its stream, to addresses [begin, end)."""

    stream: str
    index: int
    write: bool
    begin: int
    end: int
    text: str


def find_race(
    log: Sequence[HandOver], without: int = -1, communicator: frozenset[str] = frozenset()
) -> str | None:
    """The first two accesses to the same bytes, one a write, that no event orders.

    Args:
        log: entries in the order in which the host issued them.
        without: index of an entry to leave out.
        communicator: streams whose collectives go by one, in the order of the host whatever
            events say.

    Returns:
        The two accesses in words, or None.

    Raises:
        AssertionError: a stream waits for an event that is recorded later or never: a deadlock.
    """
    clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
    events: dict[tuple[str, int], Clock] = {}
    accesses: dict[int, dict[tuple, Access]] = defaultdict(dict)
    last_collective: Clock = {}
    for position, entry in enumerate(log):
        clock = clocks[entry.stream]
        event = (entry.source, entry.event)
        if position == without:
            continue
        if entry.kind == "record":
            events[event] = dict(clock)
        elif entry.kind == "wait":
            assert event in events, f"{entry.stream} waits for {event}, which nothing recorded"
            _join(clock, events[event])
        else:
            shared = entry.stream in communicator and entry.what in COLLECTIVES
            if shared:
                _join(clock, last_collective)
            clock[entry.stream] += 1
            if shared:
                last_collective = dict(clock)
            access = _access(entry, clock[entry.stream])
            for page in range(access.begin // PAGE_NBYTES, -(-access.end // PAGE_NBYTES)):
                for other in accesses[page].values():
                    if _conflict(access, other) and clock[other.stream] < other.index:
                        return f"{other.text}, then {access.text}"
                # An older access of the same kind is ordered wherever the newer one is.
                accesses[page][entry.stream, entry.kind, access.begin, access.end] = access
    return None


def _join(clock: Clock, other: Clock) -> None:
    for source, count in other.items():
        clock[source] = max(clock[source], count)


def _access(entry: HandOver, index: int) -> Access:
    text = f"{entry.what} of {entry.unit} ({entry.kind} on {entry.stream})"
    return Access(entry.stream, index, entry.kind == "write", entry.begin, entry.end, text)


def _conflict(a: Access, b: Access) -> bool:
    overlap = a.begin < b.end and b.begin < a.end
    return a.stream != b.stream and (a.write or b.write) and overlap


def waits(log: Sequence[HandOver]) -> list[int]:
    """Positions of the waits."""
    return [position for position, entry in enumerate(log) if entry.kind == "wait"]
