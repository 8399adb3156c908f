"""Measures, in a process of its own, the host time of sharding for one kind of block."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.lib.fresh import run_in_fresh_process
from bench.lib.models import Chain, ChainBlock
from bench.lib.systems import apply_fsdp2, import_zerocore

BASELINE = "plain"
# A second plain model: its difference from the first is the error of the measurement.
CONTROL = "plain again"
FLOOR = "c10d floor"
PHASES = ("forward", "backward")
# A plain model frees its gradients here; a sharded one freed the full ones in the backward.
FREEING = "zero_grad"
ALL_PHASES = (*PHASES, FREEING)


@dataclass(frozen=True)
class Cell:
    """One measurement: the shape of the chain, the systems besides plain, and its length."""

    num_params: int
    systems: tuple[str, ...]
    device: str = "cpu"
    num_blocks: int = 32
    width: int = 16
    world_size: int = 8
    num_rounds: int = 10
    steps_per_round: int = 3


@dataclass
class CellTimes:
    """Microseconds per block, one figure a round: `times[system][phase]`."""

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def extend(self, other: CellTimes) -> None:
        """Appends another run's rounds of the same cell."""
        for system, phases in other.times.items():
            own = self.times.setdefault(system, {})
            for phase, values in phases.items():
                own.setdefault(phase, []).extend(values)

    def above_plain(self, system: str, phase: str) -> float:
        """Returns the median over rounds of the time of `system` less plain's in the same round."""
        base = self.times[BASELINE][phase]
        pairs = zip(self.times[system][phase], base, strict=True)
        return median(own - plain for own, plain in pairs)

    def total_above_plain(self, system: str, phases: tuple[str, ...] = PHASES) -> float:
        """Returns the same for several phases together."""
        return median(self.rounds_above_plain(system, phases))

    def rounds_above_plain(self, system: str, phases: tuple[str, ...] = PHASES) -> list[float]:
        """Returns the same for each round."""
        own, plain = self._totals(system, phases), self._totals(BASELINE, phases)
        return [a - b for a, b in zip(own, plain, strict=True)]

    def _totals(self, system: str, phases: tuple[str, ...]) -> list[float]:
        found = self.times[system]
        return [sum(values) for values in zip(*(found[phase] for phase in phases), strict=True)]

    def floor(self) -> float:
        """Returns the median time of a block's three collectives alone."""
        return median(self.times[FLOOR]["both"])


def measure_in_fresh_process(cell: Cell) -> CellTimes:
    """Runs `cell` on torch's fake group, whose collectives return at once: only host time."""
    return run_in_fresh_process(_measure, cell)


def _measure(cell: Cell) -> CellTimes:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    # Fake collectives write nothing; denormals in that memory would slow arithmetic down.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=cell.world_size, store=FakeStore())
    models = {name: _build(name, cell) for name in (BASELINE, CONTROL, *cell.systems)}
    floor = _floor(cell)
    found = CellTimes({name: {phase: [] for phase in ALL_PHASES} for name in models})
    found.times[FLOOR] = {"both": []}
    inputs = torch.randn(8, cell.width).to(cell.device)
    names = list(models)
    for name in names * 5:
        _step_us(models[name], inputs)
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(cell.num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            _round(models[name], inputs, cell, found.times[name])
        found.times[FLOOR]["both"].append(fmean(floor() for _ in range(cell.num_blocks)))
        gc.collect()
    dist.destroy_process_group()
    return found


def _build(name: str, cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    model = Chain(cell.num_blocks, cell.num_params, cell.width).to(cell.device)
    if name == "fsdp2":
        mesh = init_device_mesh(cell.device, (cell.world_size,))
        apply_fsdp2(model, model.blocks, reshard=True, mesh=mesh)
    elif name == "fully_shard":
        import_zerocore()
        mesh = init_device_mesh(cell.device, (cell.world_size,))
        apply_fsdp2(model, model.blocks, reshard=True, mesh=mesh, engine="zerocore.fsdp")
    elif name == "zerocore":
        model = import_zerocore().shard(model, stage=3, units=[ChainBlock])
    elif name == "two_meshes":
        mesh = init_device_mesh(cell.device, (1, cell.world_size), mesh_dim_names=("ep", "edp"))
        every_other = {f"blocks.{odd}.*": mesh["edp"] for odd in range(1, cell.num_blocks, 2)}
        model = import_zerocore().shard(model, stage=3, units=[ChainBlock], groups=every_other)
    return model


def _round(model: nn.Module, inputs: Tensor, cell: Cell, times: dict[str, list[float]]) -> None:
    """Takes one step to warm up, then adds the fastest of some."""
    _step_us(model, inputs)
    steps = [_step_us(model, inputs) for _ in range(cell.steps_per_round)]
    for phase, values in zip(ALL_PHASES, zip(*steps, strict=True), strict=True):
        times[phase].append(min(values) / cell.num_blocks)


def _step_us(model: nn.Module, inputs: Tensor) -> tuple[float, float, float]:
    """Returns the host's microseconds of a forward, its backward, and dropping gradients."""
    if inputs.is_cuda:
        torch.cuda.synchronize()  # begins with an empty queue, which then never fills up
    start = time.perf_counter_ns()
    loss = model(inputs).sum()
    middle = time.perf_counter_ns()
    loss.backward()
    end = time.perf_counter_ns()
    parameters = list(model.parameters())
    before = time.perf_counter_ns()
    for parameter in parameters:
        parameter.grad = None
    freed = time.perf_counter_ns() - before
    return (middle - start) / 1e3, (end - middle) / 1e3, freed / 1e3


def _floor(cell: Cell) -> Callable[[], float]:
    """Returns a timer, in us, of a block's three collectives on the group itself."""
    group = dist.distributed_c10d._get_default_group()
    options = dist.ReduceScatterOptions()
    shard_numel = -(-cell.num_params * cell.width**2 // cell.world_size)
    shard = torch.zeros(shard_numel, device=cell.device)
    full = torch.zeros(shard_numel * cell.world_size, device=cell.device)

    def call() -> float:
        start = time.perf_counter_ns()
        group._allgather_base(full, shard).wait()
        group._allgather_base(full, shard).wait()
        group._reduce_scatter_base(shard, full, options).wait()
        return (time.perf_counter_ns() - start) / 1e3

    return call
