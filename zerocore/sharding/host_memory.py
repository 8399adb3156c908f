"""Takes the memory on the host, and the disk space, for parts of the state that are offloaded."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from zerocore._C import Engine
from zerocore.common.agreement import together
from zerocore.common.host import local_ranks
from zerocore.model.ranks import Ranks
from zerocore.options.config import ShardConfig

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


def take_host_memory(
    engine: Engine, config: ShardConfig, ranks: Ranks, device: torch.device
) -> None:
    """Reserves the disk space of this rank's file, and takes its memory on the host; collective.
    Raises MemoryError if a rank cannot have its own."""
    if config.offload is not None and config.offload.path is not None:
        with together(ranks.groups, device):
            engine.open_disk(config.offload.path, f"states-of-rank-{ranks.rank}")
    if config.leaves("states") or config.leaves("gradients"):
        with together(ranks.groups, device):
            _map_memory(engine)


def _map_memory(engine: Engine) -> None:
    nbytes, sharing = engine.host_memory_nbytes, local_ranks()
    most = obtainable_nbytes(sharing)
    available = "unknown" if most is None else f"{most:,} bytes"
    shared = "" if sharing == 1 else f", shared by {sharing} ranks"
    lack = (
        f"offload=: this rank wants {nbytes:,} bytes of the host's memory; available: {available} "
        f"on this machine{shared}. Offload less, offload to a disk (states='disk', path=), or use "
        "more ranks or machines"
    )
    if most is not None and nbytes > most:
        raise MemoryError(lack)
    try:
        engine.map_host_memory()
    except RuntimeError as error:
        raise MemoryError(f"{lack}. {error}") from error
