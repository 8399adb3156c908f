"""Measures the host time of the meters, which are always on, in a step.

Usage: python benchmarks/meters.py
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track

import zerocore
from bench.lib.models import Chain, ChainBlock
from bench.lib.results import Results
from bench.lib.tables import Table
from zerocore.model.state import state_of

NUM_BLOCKS, NUM_PARAMS, WIDTH = 32, 9, 16
WORLD_SIZE = 8
STEPS_PER_ROUND = 4
OFF, ON, TRACED = KINDS = "off", "on, an ordinary step", "on, a traced step"
NOTES = (
    f"{NUM_BLOCKS} blocks of {NUM_PARAMS} matrices of {WIDTH} x {WIDTH}, stage 3, {WORLD_SIZE} "
    "ranks on torch's fake group, whose collectives return at once: a step is only host time, so "
    "the share is the largest for a model with as many blocks.",
    "us: median of a step (forward, backward, SGD). Difference: median over the rounds, each of "
    "which runs the three in turns. Off: the two calls that open and close a step do nothing.",
)


class Stepper:
    """A chain whose steps run with its meters off, on, or on in a traced step."""

    def __init__(self) -> None:
        self.model = zerocore.shard(Chain(NUM_BLOCKS, NUM_PARAMS, WIDTH), units=[ChainBlock])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.inputs = torch.randn(8, WIDTH)
        self.meters = state_of(self.model).meters

    def seconds(self, how: str) -> float:
        """Returns the seconds of the fastest of some steps; the first closes an earlier step."""
        self._switch(how)
        return min(self._step(how) for _ in range(STEPS_PER_ROUND))

    def _switch(self, how: str) -> None:
        for name in ("begin_pass", "note_update"):
            vars(self.meters).pop(name, None)
            if how == OFF:
                vars(self.meters)[name] = lambda: None

    def _step(self, how: str) -> float:
        # Steps whose number is 1 modulo 16 are traced; beginning a step increments the number.
        self.meters._num_steps = 0 if how == TRACED else 1
        start = time.perf_counter()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def measure(rounds: int, results: Results) -> None:
    """Measures the seconds of a step of each kind, one figure a round."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    stepper = Stepper()
    found: dict[str, list[float]] = {how: [] for how in KINDS}
    for _ in range(5):
        stepper.seconds(ON)
    gc.collect()
    gc.disable()
    for index in track(range(rounds), "measuring", transient=True):
        first = index % len(KINDS)
        for how in KINDS[first:] + KINDS[:first]:
            found[how].append(stepper.seconds(how))
        results.write([meters_table(found)], {"seconds": found})
        gc.collect()
    gc.enable()
    dist.destroy_process_group()


def meters_table(found: dict[str, list[float]]) -> Table:
    """Shows the time that meters add to a step."""
    columns = ["meters", "us", "above off", "share of a step"]
    table = Table("host time of a step, by meters", columns)
    for how, values in found.items():
        above = median(own - off for own, off in zip(values, found[OFF], strict=True))
        share = above / median(found[OFF])
        table.add(how, f"{median(values) * 1e6:.0f}", f"{above * 1e6:.1f}", f"{share:.2%}")
    table.notes = list(NOTES)
    return table


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in which each kind takes its turn.")] = 60,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the host time of the meters."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # fake collectives write nothing to memory
    with Results("meters", save) as results:
        measure(rounds, results)


if __name__ == "__main__":
    typer.run(main)
