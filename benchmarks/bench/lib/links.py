"""The links that a run measures: an emulated one in one process, or torchrun's real one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.lib.systems import import_zerocore

EMULATED_WORLD_SIZE = 8
EMULATED_REPLICAS = 2
EMULATED_LATENCY_S = 20e-6


@dataclass(frozen=True)
class Traffic:
    """The number of a step's collectives of a block's size, by kind.

    With hybrid sharding, those in `across` sum a rank's shard of a block over the replicas.
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    across: int = 0


class Link:
    """A default process group, and the times of collectives on it when it is idle."""

    label = "measured"
    is_emulated = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_main = dist.get_rank() == 0

    def block_ms(self, block_nbytes: int) -> Traffic:
        """Returns the milliseconds of a block's collectives, as a `Traffic` of floats."""
        raise NotImplementedError

    def step_ms(self, block_nbytes: int, traffic: Traffic) -> float:
        """Returns the milliseconds that a step's collectives keep an idle link busy."""
        block = self.block_ms(block_nbytes)
        return (
            traffic.all_gather * block.all_gather
            + traffic.reduce_scatter * block.reduce_scatter
            + traffic.all_reduce * block.all_reduce
            + traffic.across * block.across
        )


class EmulatedLink(Link):
    """A link of one process that plays rank 0; its bandwidth can be set.

    Process groups do not share a link: the one between replicas has its own bandwidth, as
    between nodes.
    """

    label = "emulated"
    is_emulated = True

    def __init__(self, device: torch.device) -> None:
        self.zerocore = import_zerocore()
        self.emulation = self.zerocore.emulate(EMULATED_WORLD_SIZE, "inf", 0)
        super().__init__(device)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks, replicas by shards, for hybrid sharding."""
        shape = (EMULATED_REPLICAS, EMULATED_WORLD_SIZE // EMULATED_REPLICAS)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def free(self) -> None:
        """Makes the link infinitely fast: only memory traffic remains."""
        self.emulation.link = self.zerocore.emulation.link("inf", 0)
        for group in self.mesh.get_all_groups():
            self.emulation.set_group_link(group, self.emulation.link)

    def slow_down(self, block_nbytes: int, gather_ms: float) -> None:
        """Slows a gather of `block_nbytes` down to `gather_ms`, over all ranks or a replica's.

        The sum of a rank's shard of a block over the replicas takes as long.
        """
        replicas, shards = self.mesh.get_all_groups()
        self.emulation.link = self._link("all_gather", block_nbytes, EMULATED_WORLD_SIZE, gather_ms)
        for group, op, nbytes in (
            (shards, "all_gather", block_nbytes),
            (replicas, "all_reduce", block_nbytes // shards.size()),
        ):
            link = self._link(op, nbytes, group.size(), gather_ms)
            self.emulation.set_group_link(group, link)

    def _link(self, op: str, nbytes: int, num_ranks: int, ms: float) -> object:
        """Returns a link on which that collective takes so long."""
        seconds = max(ms / 1e3 - EMULATED_LATENCY_S, 1e-9)
        sent = self.zerocore.common.links.traffic_nbytes(op, nbytes, num_ranks)
        return self.zerocore.emulation.link(sent / seconds, EMULATED_LATENCY_S)

    def block_ms(self, block_nbytes: int) -> Traffic:
        kinds = self.zerocore._C.Traffic
        ms = [
            self.emulation.link.duration_ns(kind, block_nbytes, EMULATED_WORLD_SIZE) / 1e6
            for kind in (kinds.ALL_GATHER, kinds.REDUCE_SCATTER, kinds.ALL_REDUCE)
        ]
        # See slow_down(): a sum over the replicas takes as long as a gather.
        return Traffic(*ms, across=ms[0])  # type: ignore[arg-type]


class RealLink(Link):
    """The link of torchrun's ranks, over NCCL or gloo."""

    def __init__(self, device: torch.device) -> None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        super().__init__(device)
        self._cache: dict[int, Traffic] = {}

    def block_ms(self, block_nbytes: int) -> Traffic:
        if block_nbytes not in self._cache:
            shard = torch.zeros(-(-block_nbytes // 4 // dist.get_world_size()), device=self.device)
            full = torch.zeros(shard.numel() * dist.get_world_size(), device=self.device)
            calls = (
                lambda: dist.all_gather_into_tensor(full, shard),
                lambda: dist.reduce_scatter_tensor(shard, full),
                lambda: dist.all_reduce(full),
            )
            times = (self._time(call) for call in calls)
            self._cache[block_nbytes] = Traffic(*times)  # type: ignore[arg-type]
        return self._cache[block_nbytes]

    def _time(self, call: object) -> float:
        assert callable(call)
        times = []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            call()
            synchronize(self.device)
            times.append((time.perf_counter() - start) * 1e3)
        return median(times)


def synchronize(device: torch.device) -> None:
    """Waits until the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_link() -> Link:
    """Opens the real link under torchrun, otherwise the emulated one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    return RealLink(device) if "TORCHELASTIC_RUN_ID" in os.environ else EmulatedLink(device)
