"""Times how long the other ranks take to end after faults of ranks on nodes of their own."""

from __future__ import annotations

from typing import Any

from bench.lib.tables import Table

WHAT = {
    "kill": "the rank is killed",
    "stop": "the rank is stopped",
    "cut": "its link is down for good",
    "blip": "its link is down for 5 s",
}


def measure_faults(times: int, only: str, at_a_time: int) -> tuple[dict[str, Any], Table]:
    """Measures each fault several times: seconds to the last rank's end, and wrong results."""
    from tests.distributed.network_faults import LIMIT, PATIENCE, WORLD_SIZE, all_faults, play

    chosen = [fault for fault in all_faults(times) if only in str(fault)]
    raw: dict[str, Any] = {}
    for fault, (ends, found) in play(chosen, at_a_time).items():
        entry = raw.setdefault(str(fault), {"seconds": [], "wrong": []})
        entry["seconds"].append(round(max(end.seconds for end in ends), 1))
        entry["wrong"] += found
    wrong = sum(bool(entry["wrong"]) for entry in raw.values())
    columns = ["fault", *(f"on rank {rank}" for rank in range(WORLD_SIZE))]
    table = Table(f"Faults of one of {WORLD_SIZE} ranks", columns)
    for kind, what in WHAT.items():
        cells = [_spread(raw, kind, rank) for rank in range(WORLD_SIZE)]
        if any(cells):
            table.add(what, *cells)
    table.notes = [
        f"{len(chosen)} runs, each fault {times} times in each part of a step (forward, backward, "
        f"optimizer step, save, load, a barrier of the program); {wrong} went wrong.",
        "Seconds from the fault to the end of the last process that can end, least to most. Rank 0 "
        "holds the store.",
        f"The alarm's limit is {LIMIT:.0f} s. A run goes wrong if a rank takes over "
        f"{LIMIT + PATIENCE:.0f} s, does not end by itself or prints a wrong reason. Where the "
        "link comes back the limit is 30 s, and training must go on to its end.",
    ]
    return raw, table


def _spread(raw: dict[str, Any], kind: str, rank: int) -> str:
    seconds = [
        each
        for name, entry in raw.items()
        if name.startswith(kind + "/") and name.endswith(f"/{rank}")
        for each in entry["seconds"]
    ]
    return f"{min(seconds):.1f}-{max(seconds):.1f}" if seconds else ""
