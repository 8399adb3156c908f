"""Runs steps of one build of zerocore whenever it is told to; `compare_builds.py` starts it.

Reads one line with a number of steps from standard input for each line that it writes: the
microseconds of the fastest of these steps.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.models import GPT, GPT_SIZES, Chain, ChainBlock
from bench.lib.steps import build_step
from bench.lib.systems import FP32, System, import_zerocore

CHAIN_WIDTH, CHAIN_BLOCKS, FAKE_WORLD_SIZE = 16, 32, 8


@dataclass
class Case:
    """The call that is timed, and the one that comes before it each time."""

    timed: Callable[[], object]
    before: Callable[[], object] = lambda: None


def host_case(kind: str, num_params: int) -> Case:
    """At stage 3 on collectives that return at once: the time of the host is left."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_flush_denormal(True)  # fake collectives leave memory as it is
    dist.init_process_group("fake", rank=0, world_size=FAKE_WORLD_SIZE, store=FakeStore())
    zerocore = import_zerocore()
    torch.manual_seed(0)
    model = Chain(CHAIN_BLOCKS, num_params, CHAIN_WIDTH)
    zerocore.shard(model, stage=3, units=[ChainBlock])
    update = zerocore.optim.AdamW(model.parameters(), lr=0.0)
    inputs = torch.randn(8, CHAIN_WIDTH)

    def train() -> None:
        model(inputs).sum().backward()

    def step() -> None:
        train()
        update.step()
        model.zero_grad()

    cases = {
        "host_step": Case(step),
        "host": Case(train, before=model.zero_grad),
        "zero_grad": Case(model.zero_grad, before=train),
        "adamw": Case(update.step, before=train),
    }
    return cases[kind]


def rank_case(kind: str, stage: int, rank: int, world_size: int, rendezvous: str) -> Case:
    """A step of a small GPT on ranks that talk over gloo; the first one of each of many models."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    size = GPT_SIZES["small"]
    shape = (size.batch, size.sequence + 1)
    tokens: Tensor = torch.randint(size.vocab_size, shape)
    batch = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    steps: list[Callable[[Any], object]] = []

    def build() -> None:
        model = GPT(size)
        system = System("zerocore", stage, "")
        steps[:] = [build_step(system, model, model.blocks, 3e-4, FP32)]

    build()
    return Case(lambda: steps[0](batch), build if kind == "first" else lambda: None)


def main() -> None:
    """Arguments: `host_step|host|zero_grad|adamw PARAMS`, or
    `ranks|first STAGE RANK WORLD_SIZE FILE`."""
    torch.set_num_threads(1)
    kind, number, *job = sys.argv[1:]
    if kind in ("ranks", "first"):
        rank, world_size, rendezvous = job
        case = rank_case(kind, int(number), int(rank), int(world_size), rendezvous)
    else:
        case = host_case(kind, int(number))
    for _ in range(5):
        case.before()
        case.timed()
    gc.collect()
    gc.freeze()
    gc.disable()
    print(import_zerocore().__file__, flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            case.before()
            start = time.perf_counter_ns()
            case.timed()
            times.append((time.perf_counter_ns() - start) / 1e3)
        print(min(times), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
