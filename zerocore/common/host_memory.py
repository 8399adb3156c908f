"""How much of the host's memory one rank can have."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/")
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def obtainable_nbytes(local_ranks: int, system: Path = _SYSTEM) -> int | None:
    """Most bytes that each of so many ranks of this machine can have; None where nobody says.

    Memory that this process holds now counts, as a model's parameters give place to their shards. A
    container's limit counts as a whole.
    """
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
        figures = {name: int(rest.split()[0]) for name, rest in (each.split(":") for each in lines)}
        free = (figures["MemAvailable"] + figures["SwapFree"]) * 1024
        pages = int((system / "proc/self/statm").read_text().split()[1])
    except (OSError, KeyError, ValueError, IndexError):
        return None
    own = pages * os.sysconf("SC_PAGESIZE")
    limits = [limit // local_ranks for limit in _container_limits(system)]
    return min([free // local_ranks + own, *limits])


def _container_limits(system: Path) -> list[int]:
    found = []
    for name in _LIMITS:
        try:
            found.append(int((system / name).read_text()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return found


def check_obtainable(nbytes: int, local_ranks: int) -> None:
    """Raises MemoryError if a rank cannot have so many bytes, whatever becomes free."""
    most = obtainable_nbytes(local_ranks)
    if most is not None and nbytes > most:
        raise MemoryError(shortage(nbytes, local_ranks))


def shortage(nbytes: int, local_ranks: int) -> str:
    """The sentence of an error about memory that cannot be had."""
    most = obtainable_nbytes(local_ranks)
    available = "unknown" if most is None else f"{most:,} bytes"
    shared = "" if local_ranks == 1 else f", shared by {local_ranks} ranks"
    return (
        f"offload=: this rank wants {nbytes:,} bytes of the host's memory; available: {available} "
        f"on this machine{shared}. Let less leave the device, put it on a disk (states='disk', "
        "path=), or use more ranks or machines"
    )
