"""The cores and the memory of the host that one rank can have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

_PROCESSORS = Path("/sys/devices/system/cpu")


_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",  # Hydra: MPICH and Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
)


def local_ranks() -> int:
    """Ranks of this machine by the variables of torchrun, MPI or srun; 1 without any."""
    for name in _LOCAL_SIZES:
        if name in os.environ:
            return int(os.environ[name])
    tasks = [  # of each node: "4(x2),3" is 4, 4, 3
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(times or 1))
    ]
    return tasks[int(os.environ.get("SLURM_NODEID", "0"))] if tasks else 1


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
        with suppress(OSError, ValueError):  # none, or "max"
            found.append(int((system / name).read_text()))
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
