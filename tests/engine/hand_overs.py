"""Replays a log of hand-overs with vector clocks and names the first race."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# ("record", stream, number), ("wait", stream, source stream, number) or
# ("read" | "write", stream, begin, end, what, unit): addresses
Entry = tuple
Clock = dict[str, int]

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


def find_race(log: Sequence[Entry], without: int = -1) -> str | None:
    """The first two accesses to the same bytes, one a write, that no event orders.

    Args:
        log: entries in the order in which the host issued them.
        without: index of an entry to leave out.

    Returns:
        What the two accesses are, or None.

    Raises:
        AssertionError: a stream waits for an event that is recorded later or never: a deadlock.
    """
    clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
    events: dict[tuple[str, int], Clock] = {}
    accesses: dict[int, dict[tuple, Access]] = defaultdict(dict)
    for position, (kind, stream, *fields) in enumerate(log):
        clock = clocks[stream]
        if position == without:
            continue
        if kind == "record":
            events[stream, fields[0]] = dict(clock)
        elif kind == "wait":
            assert tuple(fields) in events, f"{stream} waits for {fields}, which nothing recorded"
            for source, count in events[tuple(fields)].items():
                clock[source] = max(clock[source], count)
        else:
            clock[stream] += 1
            access = _access(kind, stream, clock[stream], fields)
            for page in range(access.begin // PAGE_NBYTES, -(-access.end // PAGE_NBYTES)):
                for other in accesses[page].values():
                    if _conflict(access, other) and clock[other.stream] < other.index:
                        return f"{other.text}, then {access.text}"
                # An older access of the same kind is ordered wherever the newer one is.
                accesses[page][stream, kind, access.begin, access.end] = access
    return None


def _access(kind: str, stream: str, index: int, fields: list) -> Access:
    begin, end, what, unit = fields
    return Access(
        stream, index, kind == "write", begin, end, f"{what} of {unit} ({kind} on {stream})"
    )


def _conflict(a: Access, b: Access) -> bool:
    overlap = a.begin < b.end and b.begin < a.end
    return a.stream != b.stream and (a.write or b.write) and overlap


def waits(log: Sequence[Entry]) -> list[int]:
    """Positions of the waits."""
    return [position for position, entry in enumerate(log) if entry[0] == "wait"]
