"""Times AdamW on the CPU by number of threads, and the memory bandwidth of as many threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bench.kernels.contests import OWN
from bench.lib.fresh import run_in_fresh_process
from bench.lib.systems import is_installed
from bench.lib.timing import Call, time_in_turns
from bench.optimizer.contests import Weights
from zerocore import _C

OWN_THREADS = "zerocore, on threads that it starts"
TORCH, DEEPSPEED = "torch fused", "DeepSpeedCPUAdam"
NBYTES_EACH = 28  # fp32: weight, gradient and two moments read, weight and moments written
MEMORY = ("memory: copy", "memory: scale in place", "memory: triad")


@dataclass(frozen=True)
class AdamWCell:
    """The numbers of fp32 parameters and of threads; each thread has a core to itself."""

    threads: int
    numel: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Bytes of one pass over all memory that a step touches."""
        return NBYTES_EACH * self.numel


def measure_in_fresh_process(cell: AdamWCell) -> dict[str, list[float]]:
    """Returns the seconds of a step, or of moving as many bytes, by name, one figure a round.

    Needs a new process: OpenMP libraries read their number of threads once, and DeepSpeed's is not
    torch's.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: cell.threads])
    os.environ["OMP_NUM_THREADS"] = str(cell.threads)
    try:
        return run_in_fresh_process(_measure, cell)
    finally:
        os.sched_setaffinity(0, cores)
        del os.environ["OMP_NUM_THREADS"]


def _measure(cell: AdamWCell) -> dict[str, list[float]]:
    torch.set_num_threads(cell.threads)
    calls = {OWN: Weights(cell.numel, "cpu").zerocore_step()}
    calls[OWN_THREADS] = _step_on_own_threads(cell)
    calls[TORCH] = Weights(cell.numel, "cpu").torch_step()
    if is_installed("deepspeed"):
        calls[DEEPSPEED] = Weights(cell.numel, "cpu").deepspeed_step()
    return time_in_turns(calls | _memory_calls(cell.nbytes), "cpu", cell.rounds)


def _step_on_own_threads(cell: AdamWCell) -> Call:
    """Returns a step in which each thread updates its part of the parameters, without torch's."""
    steps = [
        Weights(cell.numel // cell.threads, "cpu").zerocore_step() for _ in range(cell.threads)
    ]
    pool = ThreadPoolExecutor(cell.threads, initializer=_C.use_host_threads, initargs=(1,))
    return lambda: list(pool.map(lambda step: step(), steps))


def _memory_calls(nbytes: int) -> dict[str, Call]:
    """Returns calls that move memory as STREAM does; each reads and writes `nbytes` in all.

    Reads that the processor makes of memory before it writes there do not count.
    """
    a, b = (torch.rand(nbytes // 8) for _ in range(2))
    x, y, z = (torch.rand(nbytes // 12) for _ in range(3))
    c = torch.rand(nbytes // 8)
    calls: tuple[Call, ...] = (
        lambda: a.copy_(b),
        lambda: c.mul_(1.0),
        lambda: torch.add(x, y, alpha=3.0, out=z),
    )
    return dict(zip(MEMORY, calls, strict=True))
