"""Trains a stack of GPT blocks under several systems and links, and times the steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.lib.links import EmulatedLink, Link, Traffic, synchronize
from bench.lib.models import BlockStack
from bench.lib.systems import System, import_zerocore, wrap_model
from zerocore.common.events import COLLECTIVES

PLAIN = System("plain", None, "plain")
COMPARED = (
    PLAIN,
    System("ddp", 0, "DDP"),
    System("zerocore", 1, "zerocore stage 1"),
    System("zerocore", 2, "zerocore stage 2"),
    System("fsdp2", 3, "FSDP2"),
    System("fsdp2", 3, "FSDP2, async", overlap=True),
    System("zerocore", 3, "zerocore stage 3"),
)
OTHER_OPTIONS = (
    System("zerocore", 3, "zerocore stage 3, prefetch 0", prefetch=0),
    System("zerocore", 3, "zerocore stage 3, prefetch 2", prefetch=2),
    System("zerocore", 3, "zerocore stage 3, 2 reductions", reductions=2),
)
HYBRID = (
    System("zerocore", 2, "zerocore stage 2, hybrid", hybrid=True),
    System("fsdp2", 3, "FSDP2, async, hybrid", overlap=True, hybrid=True),
    System("zerocore", 3, "zerocore stage 3, hybrid", hybrid=True),
)
# Ratios of communication to compute; the comparison's is among them.
GOAL_RATIO = 0.8
RATIOS = (0.25, 0.5, GOAL_RATIO, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Workload:
    """The model's blocks, elements and tokens, and the length of the measurement."""

    num_blocks: int
    width: int
    num_heads: int
    batch: int
    sequence: int
    num_rounds: int
    ratios: tuple[float, ...] = RATIOS
    steps_per_round: int = 3
    dtype: str = "float32"


WORKLOADS = {
    "cpu": Workload(8, 256, 4, 2, 128, num_rounds=3),
    "cuda": Workload(16, 2048, 16, 4, 1024, num_rounds=3, dtype="bfloat16"),
    "quick": Workload(4, 64, 4, 2, 64, num_rounds=1, ratios=(GOAL_RATIO,), steps_per_round=1),
}


@dataclass
class Rounds:
    """A system on a link: the fastest step of each round and its exposed waits, in ms."""

    step_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)


@dataclass
class Subject:
    """A system with its model; `rounds` by ratio, which is 0 for a free or a real link."""

    system: System
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rounds: dict[float, Rounds] = field(default_factory=dict)

    def in_sweep(self) -> bool:
        return self.system.stage == 3 and not self.system.hybrid


@dataclass
class Compute:
    """Milliseconds of the plain model."""

    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def traffic_of(system: System, num_blocks: int) -> Traffic:
    """Returns the collectives of a step: zerocore keeps the last block for the backward."""
    if system.peer == "plain":
        return Traffic()
    if system.stage == 0:
        return Traffic(all_reduce=num_blocks)
    across = num_blocks if system.hybrid else 0
    if system.stage != 3:
        return Traffic(all_gather=num_blocks, reduce_scatter=num_blocks, across=across)
    kept = 1 if system.peer == "zerocore" else 0
    return Traffic(all_gather=2 * num_blocks - kept, reduce_scatter=num_blocks, across=across)


def unavoidable_of(system: System) -> Traffic:
    """Returns the collectives that no schedule can hide: the first gather and the last reduction.

    With hybrid sharding that reduction ends with the sum over the replicas, which needs the
    result of the reduce-scatter.
    """
    if system.peer == "plain":
        return Traffic()
    if system.stage == 0:
        return Traffic(all_reduce=1)
    return Traffic(all_gather=1, reduce_scatter=1, across=1 if system.hybrid else 0)


class OverlapRun:
    """The measurement of all systems on one link, in turns, so that drift affects all alike."""

    def __init__(self, link: Link, workload: Workload, systems: Sequence[System]) -> None:
        self.link = link
        self.workload = workload
        self.dtype = getattr(torch, workload.dtype)
        shape = (workload.batch, workload.sequence, workload.width)
        self.inputs = torch.randn(shape, device=link.device, dtype=self.dtype)
        self.block_nbytes = self._block_nbytes()
        self.subjects = [self.build(system) for system in systems]
        for subject in self.subjects * 3:
            self.step(subject)
        gc.collect()
        gc.freeze()
        self.compute = self._time_compute()

    def _make_model(self) -> BlockStack:
        work = self.workload
        torch.manual_seed(0)
        with torch.device(self.link.device):
            return BlockStack(work.num_blocks, work.width, work.num_heads).to(self.dtype)

    def _block_nbytes(self) -> int:
        block = self._make_model().blocks[0]
        return sum(p.numel() * p.element_size() for p in block.parameters())

    def build(self, system: System) -> Subject:
        """Wraps a model for a system and makes its optimizer."""
        stack = self._make_model()
        # A default bucket would hold the whole of this small model, and nothing could overlap.
        bucket_mb = self.block_nbytes / 2**20
        mesh = self.link.mesh if system.hybrid else None
        model = wrap_model(system, stack, stack.blocks, bucket_mb=bucket_mb, mesh=mesh)
        return Subject(system, model, torch.optim.SGD(model.parameters(), lr=1e-6))

    def step(self, subject: Subject) -> float:
        """Returns the ms of forward and backward; the untimed update makes stages 1, 2 gather."""
        if not self.link.is_emulated:
            dist.barrier()
        synchronize(self.link.device)
        start = time.perf_counter()
        subject.model(self.inputs).backward()
        synchronize(self.link.device)
        end = time.perf_counter()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        return (end - start) * 1e3

    def _time_compute(self) -> Compute:
        plain = self.subjects[0].model
        times = []
        for _ in range(2 * self.workload.steps_per_round + 1):
            synchronize(self.link.device)
            start = time.perf_counter()
            loss = plain(self.inputs)
            synchronize(self.link.device)
            middle = time.perf_counter()
            loss.backward()
            synchronize(self.link.device)
            end = time.perf_counter()
            times.append(((middle - start) * 1e3, (end - middle) * 1e3))
        return Compute(*(median(part) for part in zip(*times, strict=True)))

    def gather_ms(self, ratio: float) -> float:
        """Returns a gather's ms for stage 3 to communicate `ratio` times as long as it computes.

        A block communicates once in forward and twice in backward (a gather and a
        reduction), like its compute, so the ratio holds approximately in both directions.
        """
        traffic = traffic_of(System("zerocore", 3, ""), self.workload.num_blocks)
        return ratio * self.compute.total_ms / (traffic.all_gather + traffic.reduce_scatter)

    def set_ratio(self, ratio: float) -> None:
        """Sets the emulated link's speed; does nothing for a real one."""
        if isinstance(self.link, EmulatedLink):
            if ratio == 0:
                self.link.free()
            else:
                self.link.slow_down(self.block_nbytes, self.gather_ms(ratio))

    def directions(self) -> tuple[float, float]:
        """Returns communication / compute at the goal's ratio, in forward and in backward."""
        gather, blocks = self.gather_ms(GOAL_RATIO), self.workload.num_blocks
        backward = (2 * blocks - 1) * gather / self.compute.backward_ms
        return blocks * gather / self.compute.forward_ms, backward

    def ratios_of(self, subject: Subject) -> list[float]:
        """Returns the ratios at which a system is measured."""
        if not self.link.is_emulated:
            return [0.0]
        return [0.0, *(r for r in self.workload.ratios if subject.in_sweep() or r == GOAL_RATIO)]

    def measure_round(self, index: int) -> None:
        """Measures every system at each ratio once; each round begins with another system."""
        first = index * 3 % len(self.subjects)
        for subject in self.subjects[first:] + self.subjects[:first]:
            for ratio in self.ratios_of(subject):
                self.set_ratio(ratio)
                self.step(subject)
                rounds = subject.rounds.setdefault(ratio, Rounds())
                steps = [self.step(subject) for _ in range(self.workload.steps_per_round)]
                rounds.step_ms.append(min(steps))
                waited = self._waited_ms(subject)
                if waited is not None:
                    rounds.wait_ms.append(waited)

    def _waited_ms(self, subject: Subject) -> float | None:
        """Returns a step's exposed time, from the runtime's timeline, or a peer's from the link.

        None if neither has it: for FSDP2 on a GPU, and for DDP, which waits for futures.
        """
        if subject.system.peer == "zerocore":
            return sum(event.wait_ns for event in self.trace(subject)) / 1e6
        link = self.link
        if subject.system.peer != "fsdp2" or link.device.type != "cpu":
            return None
        if not isinstance(link, EmulatedLink):
            return None
        before = link.emulation.waited_ns
        self.step(subject)
        return (link.emulation.waited_ns - before) / 1e6

    def trace(self, subject: Subject) -> list[Any]:
        """Returns the events of one step of a zerocore system on the present link."""
        with import_zerocore().reporting.record_events(subject.model) as events:
            self.step(subject)
        return [event for event in events if event.op in COLLECTIVES]

    def raw(self) -> dict[str, Any]:
        """Returns all measurements for the result file."""
        return {
            "link": self.link.label,
            "world_size": dist.get_world_size(),
            "workload": asdict(self.workload),
            "block_nbytes": self.block_nbytes,
            "compute": asdict(self.compute),
            "systems": {
                subject.system.label: {str(r): asdict(v) for r, v in subject.rounds.items()}
                for subject in self.subjects
            },
        }
