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
    """Returns this machine's ranks from the variables of torchrun, MPI or srun; 1 without any."""
    for name in _LOCAL_SIZES:
        if name in os.environ:
            return int(os.environ[name])
    tasks = [  # per node: "4(x2),3" means 4, 4, 3
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(times or 1))
    ]
    return tasks[int(os.environ.get("SLURM_NODEID", "0"))] if tasks else 1


def num_cores(processors: Iterable[int], folder: Path = _PROCESSORS) -> int:
    """Returns the physical cores of logical processors; counts each as one if unknown."""
    siblings = set()
    for processor in processors:
        path = folder / f"cpu{processor}" / "topology" / "thread_siblings_list"
        siblings.add(path.read_text() if path.exists() else f"{processor}")
    return len(siblings)


def host_threads(local_ranks: int) -> int:
    """Returns the threads for a rank's work on the host: from 1 to one per physical core.

    A rank that is bound to cores (by ``numactl``, ``taskset``, a scheduler) has them to itself. A
    rank that may run on its launcher's cores shares them with the other ``local_ranks``.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // local_ranks)
    allowed, of_parent = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    cores = num_cores(allowed)
    return cores if allowed < of_parent else max(1, cores // local_ranks)


def update_threads(device: torch.device) -> int:
    """Returns the threads that share an update on the host while ``device`` computes.

    Leaves one core to the thread that feeds a device. If the CPU computes as well, the update has
    no more threads than torch, a number that the user may have set.
    """
    cores = host_threads(local_ranks())
    if device.type == "cpu":
        return min(cores, torch.get_num_threads())
    return max(1, cores - 1)


_SYSTEM = Path("/")
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def obtainable_nbytes(local_ranks: int, system: Path = _SYSTEM) -> int | None:
    """Returns the most bytes that each of so many ranks can have here; None if unknown.

    Counts the memory of this process, because shards will replace a model's parameters. Counts a
    container's limit in full.
    """
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
        figures = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        free = (figures["MemAvailable"] + figures["SwapFree"]) * 1024
        pages = int((system / "proc/self/statm").read_text().split()[1])
    except (OSError, KeyError, ValueError, IndexError):
        return None
    resident = pages * os.sysconf("SC_PAGESIZE")
    limits = [limit // local_ranks for limit in _container_limits(system)]
    return min([free // local_ranks + resident, *limits])


def _container_limits(system: Path) -> list[int]:
    limits = []
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((system / name).read_text()))
    return limits


def check_obtainable(nbytes: int, local_ranks: int) -> None:
    """Raises MemoryError if a rank can never have so many bytes on this machine."""
    most = obtainable_nbytes(local_ranks)
    if most is not None and nbytes > most:
        raise MemoryError(shortage(nbytes, local_ranks))


def shortage(nbytes: int, local_ranks: int) -> str:
    """Returns the message of an error about memory that the host does not have."""
    most = obtainable_nbytes(local_ranks)
    available = "unknown" if most is None else f"{most:,} bytes"
    shared = "" if local_ranks == 1 else f", shared by {local_ranks} ranks"
    return (
        f"offload=: this rank wants {nbytes:,} bytes of the host's memory; available: {available} "
        f"on this machine{shared}. Offload less, offload to a disk (states='disk', path=), or use "
        "more ranks or machines"
    )
