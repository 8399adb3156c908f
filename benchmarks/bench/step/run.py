"""Trains a GPT under one system for some steps on this rank, and reports time and memory."""

from __future__ import annotations

import gc
import importlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.lib.models import GPT, GPT_SIZES, GPTSize
from bench.lib.steps import MicroBatch, build_step
from bench.lib.systems import FP32, Recipe, System
from bench.step.process_memory import peak_resident_mib, reset_peak, resident_mib

NUM_BATCHES = 4
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class RunLength:
    """The number of warm-up steps and of timed steps."""

    num_warmup: int
    num_steps: int

    def with_accumulation(self, num_micro_batches: int) -> RunLength:
        """Returns fewer steps, as each is longer."""
        if num_micro_batches == 1:
            return self
        return RunLength(2, max(3, self.num_steps // num_micro_batches))


@dataclass(frozen=True)
class RankReport:
    """A rank's results: each timed step in ms, the last loss in nats, memory in MiB.

    Memory is resident memory of the process on the CPU, allocated memory on a GPU.
    """

    step_ms: list[float]
    loss: float
    imported_mib: float
    peak_mib: float


def run_on_this_rank(
    system: System,
    size_name: str,
    length: RunLength,
    device: str = "cpu",
    recipe: Recipe = FP32,
) -> RankReport:
    """Trains from a fixed seed on batches that depend only on the rank.

    So all systems have the same weights and batches, and their losses can be compared. The peak
    memory is the peak in the timed steps.
    """
    if system.peer == "deepspeed":
        importlib.import_module("deepspeed")
    imported_mib = resident_mib() if device == "cpu" else 0.0
    size = GPT_SIZES[size_name]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(size).to(getattr(torch, size.dtype))
    step = build_step(system, model, model.blocks, LEARNING_RATE, recipe)
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in _batches(size)]

    def batches_of(step_index: int) -> list[MicroBatch]:
        first = step_index * recipe.accumulate
        return [batches[i % NUM_BATCHES] for i in range(first, first + recipe.accumulate)]

    for index in range(length.num_warmup):
        step(batches_of(index))
    gc.collect()
    _reset_peak(device)
    dist.barrier()
    step_ms, loss = [], 0.0
    for index in range(length.num_warmup, length.num_warmup + length.num_steps):
        start = time.perf_counter()  # a step ends with reading its loss: the device is idle
        loss = step(batches_of(index))
        step_ms.append((time.perf_counter() - start) * 1e3)
    return RankReport(step_ms, loss, imported_mib, _peak_mib(device))


def _reset_peak(device: str) -> None:
    if device == "cpu":
        reset_peak()
    else:
        torch.cuda.reset_peak_memory_stats()


def _peak_mib(device: str) -> float:
    return peak_resident_mib() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def _batches(size: GPTSize) -> list[MicroBatch]:
    """Makes a few random batches of (inputs, targets), which the model memorises."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (NUM_BATCHES, size.batch, size.sequence + 1)
    tokens = torch.randint(size.vocab_size, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]
