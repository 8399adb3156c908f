"""The cores of the host that one rank can have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
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
