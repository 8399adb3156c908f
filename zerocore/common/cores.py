"""The cores that this process may run on, and how many threads its work on the host gets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

_PROCESSORS = Path("/sys/devices/system/cpu")


def local_ranks() -> int:
    """Ranks of this machine, as torchrun says; 1 where nobody does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def num_cores(processors: Iterable[int], folder: Path = _PROCESSORS) -> int:
    """Physical cores behind logical processors; each is one where the system does not tell."""
    siblings = set()
    for processor in processors:
        path = folder / f"cpu{processor}" / "topology" / "thread_siblings_list"
        siblings.add(path.read_text() if path.exists() else f"{processor}")
    return len(siblings)


def host_threads(local_ranks: int) -> int:
    """Threads for one rank's work on the host: at least 1, at most one for each physical core.

    A rank that was bound to cores (by ``numactl``, ``taskset``, a scheduler) has those to itself.
    One that may run wherever its launcher may shares the cores with the other ``local_ranks``.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // local_ranks)
    own, parent = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    cores = num_cores(own)
    return cores if own < parent else max(1, cores // local_ranks)


def update_threads(device: torch.device) -> int:
    """Threads that share an update on the host while ``device`` computes.

    One core is left to the thread that feeds a device. Where the CPU computes as well, the update
    has as many threads as torch computes with, which is what a user has set for that.
    """
    cores = host_threads(local_ranks())
    if device.type == "cpu":
        return min(cores, torch.get_num_threads())
    return max(1, cores - 1)
