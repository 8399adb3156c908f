"""Trains a system for some steps in a new process and measures its memory by phase."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import zerocore
from bench.lib.fresh import run_in_fresh_process
from bench.lib.models import GPT, GPT_SIZES, GPTSize
from bench.lib.systems import System, apply_fsdp2
from bench.memory.sampler import CpuMemory, CudaMemory, Memory, Sample, Sampler
from zerocore.planning import MemoryBytes

SIZES = {
    **GPT_SIZES,
    "7b": GPTSize(num_blocks=32, width=4096, num_heads=32, vocab_size=64000, sequence=1024),
    "4b": GPTSize(num_blocks=36, width=2944, num_heads=23, vocab_size=43008, sequence=1024),
}
# The most interesting systems first, as a run may be cut short.
SYSTEMS = (
    *(System("zerocore", stage, f"stage {stage}") for stage in (3, 0, 1, 2)),
    System("fsdp2", 3, "FSDP2"),
)
PHASES = ("after shard", "first forward", "first backward", "first step", "steady steps")
NUM_STEADY = 3
NOTHING = MemoryBytes(parameters=0, gradients=0, optimizer=0, pool=0)
# Freed blocks of 64 KiB and more return to the system, so resident memory is memory in use.
HONEST_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Cell:
    """One run: rank 0 of `world_size` emulated ranks trains a GPT with AdamW."""

    system: System
    size: str
    world_size: int
    batch: int
    dtype: str
    device: str


@dataclass
class Phase:
    """Bytes at the end of a phase and at its peak, above the bytes before the model."""

    outside: int
    outside_peak: int
    allocated: int
    allocated_peak: int
    reserved_peak: int


@dataclass
class MemoryRun:
    """Results of one run, in bytes.

    `baseline` are the bytes in use, seen from outside, before the model; figures of phases
    are above it. `planned` is the prediction for zerocore, `planned_activations` the
    prediction of `zerocore.plan`.
    """

    label: str
    stage: int = 0
    num_params: int = 0
    baseline: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)
    measured: MemoryBytes = NOTHING
    planned: MemoryBytes | None = None
    saved_activations: int = 0
    planned_activations: int | None = None
    step: list[Sample] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)


def measure_in_fresh_process(cell: Cell) -> MemoryRun:
    """Measures `cell` in a process in which nothing else was allocated."""
    saved = {name: os.environ.get(name) for name in HONEST_MALLOC}
    os.environ.update(HONEST_MALLOC)
    try:
        return run_in_fresh_process(_measure, cell)
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class _Trainer:
    """The training of a cell's model under its system; each method is a part of a step."""

    def __init__(self, cell: Cell) -> None:
        size = SIZES[cell.size]
        self.device = torch.device(cell.device)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = GPT(size).to(getattr(torch, cell.dtype))
        self.num_params = sum(param.numel() for param in model.parameters())
        self.model: nn.Module = model
        self.is_zerocore = cell.system.peer == "zerocore"
        if self.is_zerocore:
            zerocore.shard(model, stage=cell.system.stage, device=self.device)
        else:
            apply_fsdp2(model, model.blocks, reshard=True)
            model.to_empty(device=self.device)
            with torch.no_grad():
                for param in model.parameters():
                    nn.init.normal_(param.to_local(), std=0.02)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        shape = (cell.batch, size.sequence + 1)
        self.tokens = torch.randint(size.vocab_size, shape, device=self.device)

    def forward(self) -> Tensor:
        return self.model(self.tokens[:, :-1], self.tokens[:, 1:])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self, gradients: int) -> MemoryBytes:
        """Returns bytes by kind; uses `gradients` if the system does not report any."""
        if self.is_zerocore:
            return zerocore.memory_usage(self.model, self.optimizer)
        params = sum(_local_nbytes(param) for param in self.model.parameters())
        states = sum(
            _local_nbytes(value)
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        return MemoryBytes(params, gradients, states, pool=0)

    def gradient_nbytes(self) -> int:
        """Returns the bytes of `.grad`, after a backward."""
        grads = (param.grad for param in self.model.parameters())
        return sum(_local_nbytes(grad) for grad in grads if grad is not None)


def _local_nbytes(tensor: Tensor) -> int:
    to_local = getattr(tensor, "to_local", getattr(tensor, "local", None))
    local = tensor if to_local is None else to_local()
    return local.numel() * local.element_size()


def _measure(cell: Cell) -> MemoryRun:
    torch.set_num_threads(1)
    memory = _warm_up(cell)
    with zerocore.emulate(cell.world_size, "inf", 0):
        return _measure_phases(cell, memory)


def _warm_up(cell: Cell) -> Memory:
    """Takes a step of a small model, which loads kernels, libraries and a GPU's context."""
    device = torch.device(cell.device)
    layer = nn.Linear(8, 8, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 8, device=device)).sum().backward()
    optimizer.step()
    del layer, optimizer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return CudaMemory(device)
    return CpuMemory()


def _measure_phases(cell: Cell, memory: Memory) -> MemoryRun:
    start = Sampler(memory).read()
    run = MemoryRun(cell.system.label, cell.system.stage or 0, baseline=start.outside)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with Sampler(memory) as sampler:
            yield
            _synchronize(cell)
        run.phases[name] = _phase(sampler, start)

    with phase("after shard"):
        trainer = _Trainer(cell)
    with phase("first forward"):
        loss = trainer.forward()
    with phase("first backward"):
        loss.backward()
    gradients = trainer.gradient_nbytes()
    with phase("first step"):
        trainer.update()
    with phase("steady steps"):
        for _ in range(NUM_STEADY):
            trainer.forward().backward()
            trainer.update()
    run.num_params = trainer.num_params
    samples, run.marks = _sample_step(cell, trainer, memory)
    run.step = [_above(sample, start) for sample in samples]
    run.measured = trainer.parts(gradients)
    run.saved_activations = _saved_nbytes(trainer)
    if trainer.is_zerocore:
        run.planned = zerocore.planning.predict_memory(trainer.model)
    run.planned_activations = _planned_activations(cell)
    return run


def _phase(sampler: Sampler, start: Sample) -> Phase:
    """Makes a phase's figures from its samples, and from the allocator's peaks if it has any."""
    allocated_peak, reserved_peak = sampler.memory.peaks()
    last = sampler.samples[-1]
    return Phase(
        last.outside - start.outside,
        sampler.peak(lambda sample: sample.outside) - start.outside,
        last.allocated - start.allocated,
        max(allocated_peak, sampler.peak(lambda sample: sample.allocated)) - start.allocated,
        max(reserved_peak, sampler.peak(lambda sample: sample.reserved)) - start.reserved,
    )


def _above(sample: Sample, start: Sample) -> Sample:
    return Sample(
        sample.time_ns,
        sample.outside - start.outside,
        sample.allocated - start.allocated,
        sample.reserved - start.reserved,
    )


def _sample_step(
    cell: Cell, trainer: _Trainer, memory: Memory
) -> tuple[list[Sample], dict[str, int]]:
    """Samples memory during one steady step, and notes when its parts begin."""
    marks: dict[str, int] = {}

    def mark(name: str) -> None:
        _synchronize(cell)
        marks[name] = time.perf_counter_ns()

    with Sampler(memory) as sampler:
        mark("forward")
        loss = trainer.forward()
        mark("backward")
        loss.backward()
        mark("optimizer")
        trainer.update()
        mark("end")
    return sampler.samples, marks


def _saved_nbytes(trainer: _Trainer) -> int:
    """Returns the bytes that autograd saves in a forward, by storage, without parameters."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = trainer.forward()
    loss.backward()
    trainer.update()
    return sum(saved.values())


def _planned_activations(cell: Cell) -> int | None:
    """Returns the peak of activations by `zerocore.plan`; None if it cannot run the model."""
    size = SIZES[cell.size]
    with torch.device("meta"):
        model = GPT(size).to(getattr(torch, cell.dtype))
        tokens = torch.zeros((cell.batch, size.sequence), dtype=torch.long)
    found = zerocore.plan(
        model,
        cell.world_size,
        workload=zerocore.Workload(inputs=(tokens, tokens), loss=lambda gpt, pair: gpt(*pair)),
    )
    return None if found.activations is None else found.activations.peak_nbytes


def _synchronize(cell: Cell) -> None:
    if cell.device.startswith("cuda"):
        torch.cuda.synchronize()
