"""Runs one rank of one build of zerocore, which times a case on command.

Usage: python -m bench.speed.worker fake|gloo RANK WORLD_SIZE RENDEZVOUS

`turns.py` starts it. It answers each line of standard input with a line of JSON:
`start CASE` warms a case up and says where zerocore was imported from, `turn STEPS` times it,
`stop` drops it and says the peak of its memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.lib.models import GPT, GPT_SIZES, Chain, ChainBlock
from bench.lib.steps import build_step
from bench.lib.systems import FP32, System
from bench.step.process_memory import peak_resident_mib, reset_peak, resident_mib

WIDTH, BLOCKS, PARAMS, FAKE_WORLD_SIZE = 16, 32, 9, 8
TIMEOUT = timedelta(seconds=60)


@dataclass
class Case:
    """The call that is timed, and the call before each one."""

    timed: Callable[[], object]
    before: Callable[[], object] = lambda: None
    warmup: int = 4


def step_case(size_name: str, stage: int) -> Case:
    """Makes a training step of a GPT."""
    size = GPT_SIZES[size_name]
    step = build_step(System("zerocore", stage, ""), *_gpt(size_name), 3e-4, FP32)
    tokens = torch.randint(size.vocab_size, (size.batch, size.sequence + 1))
    batch = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    return Case(lambda: step(batch), warmup=2 if size_name == "29m" else 6)


def first_case() -> Case:
    """Makes the first step of a model, in which ranks compare calls and collectives."""
    case = Case(lambda: None)

    def build() -> None:
        case.timed = step_case("small", 3).timed

    case.before = build
    return case


def host_case(kind: str) -> Case:
    """Makes a block or a step with collectives that return at once, for the host's time alone."""
    zerocore = importlib.import_module("zerocore")
    torch.manual_seed(0)
    model = Chain(BLOCKS, PARAMS, WIDTH)
    zerocore.shard(model, stage=3, units=[ChainBlock])
    inputs = torch.randn(8, WIDTH)

    def train() -> None:
        model(inputs).sum().backward()

    if kind == "block":
        return Case(train, before=model.zero_grad, warmup=10)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.0, clip_grad_norm=1.0)

    def refresh() -> None:
        model.zero_grad()
        train()

    return Case(optimizer.step, before=refresh, warmup=10)


def checkpoint_case(kind: str, folder: Path) -> Case:
    """Makes a save of weights and states, or a load into an optimizer without states."""
    zerocore: Any = importlib.import_module("zerocore")
    model, blocks = _gpt("10m")
    model = zerocore.shard(model, stage=3, units=[*blocks])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, GPT_SIZES["10m"].sequence, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, background=False)
    loaded: list[Any] = []

    def remove() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    def forget() -> None:
        fresh = torch.optim.AdamW(model.parameters(), fused=True)
        loaded[:] = [zerocore.Checkpoints(folder, model, fresh)]
        dist.barrier()

    if kind == "save":
        return Case(lambda: checkpoints.save(1), remove, warmup=1)
    checkpoints.save(1)
    return Case(lambda: loaded[0].load(), forget, warmup=1)


def export_case(kind: str) -> Case:
    """Makes an export of all weights to every rank, of `shard` or `fsdp`."""
    zerocore: Any = importlib.import_module("zerocore")
    model, blocks = _gpt("29m")
    if kind == "shard":
        zerocore.shard(model, stage=3, units=[*blocks])
    else:
        fully_shard = importlib.import_module("zerocore.fsdp").fully_shard
        for module in (*blocks, model):
            fully_shard(module)

    def export() -> None:
        for _ in zerocore.export(model):
            pass

    return Case(export, warmup=2)


def _gpt(size_name: str) -> tuple[GPT, Any]:
    torch.manual_seed(0)
    model = GPT(GPT_SIZES[size_name])
    return model, model.blocks


def make_case(name: str, rendezvous: Path) -> Case:
    """Makes a case: `29m/STAGE`, `small/STAGE`, `first`, `host/block`, `disk/save`,
    `export/fsdp`, ..."""
    group, _, which = name.partition("/")
    if group == "first":
        return first_case()
    if group == "host":
        return host_case(which)
    if group == "export":
        return export_case(which)
    if group == "disk":
        return checkpoint_case(which, rendezvous.parent / which)
    return step_case(group, int(which))


class Worker:
    """The current case, and the resident memory before it."""

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = Path(rendezvous)
        self._case: Case | None = None
        self._resident = 0.0

    def start(self, name: str) -> dict[str, Any]:
        """Builds a case and warms it up."""
        reset_peak()
        self._resident = resident_mib()
        self._case = make_case(name, self._rendezvous)
        self.turn(str(self._case.warmup))
        gc.collect()
        gc.freeze()
        gc.disable()
        reset_peak()
        return {"file": importlib.import_module("zerocore").__file__}

    def turn(self, num_steps: str) -> dict[str, Any]:
        """Returns the microseconds of each step: wall time, and CPU time of all threads."""
        assert self._case is not None
        wall, cpu = [], []
        for _ in range(int(num_steps)):
            self._case.before()
            start, busy = time.perf_counter_ns(), time.process_time_ns()
            self._case.timed()
            cpu.append((time.process_time_ns() - busy) / 1e3)
            wall.append((time.perf_counter_ns() - start) / 1e3)
        return {"wall": wall, "cpu": cpu}

    def stop(self) -> dict[str, Any]:
        """Drops the case."""
        peak = peak_resident_mib() - self._resident
        self._case = None
        gc.enable()
        gc.unfreeze()
        gc.collect()
        return {"peak": peak}


def connect(backend: str, rank: int, world_size: int, rendezvous: str) -> None:
    """Joins the ranks of this build."""
    if backend == "gloo":
        store = dist.FileStore(rendezvous, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_flush_denormal(True)  # fake collectives write nothing to memory
    dist.init_process_group("fake", rank=0, world_size=FAKE_WORLD_SIZE, store=FakeStore())


def main() -> None:
    """Answers on standard output, and redirects all other output to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    backend, rank, world_size, rendezvous = sys.argv[1:]
    connect(backend, int(rank), int(world_size), rendezvous)
    worker = Worker(rendezvous)
    for line in sys.stdin:
        command, *words = line.split()
        print(json.dumps(getattr(worker, command)(*words)), file=answers, flush=True)
    os._exit(0)  # a normal exit may wait for a rank that has ended


if __name__ == "__main__":
    main()
