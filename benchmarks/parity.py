"""Compares losses in bf16: zerocore's stages, FSDP2 with the same policy, DDP under autocast.

Usage: python benchmarks/parity.py --ranks 2 --steps 50
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from bench.lib.models import GPT, GPT_SIZES, GPTSize
from bench.lib.ranks import run_on_ranks
from bench.lib.results import Results
from bench.lib.steps import MicroBatch, build_step
from bench.lib.systems import SYSTEMS, Recipe, System
from bench.lib.tables import Table

LEARNING_RATE = 1e-3
RUN_TIMEOUT_S = 600.0
COMPARED = [s for s in SYSTEMS if s.label in ("DDP", "FSDP2") or s.peer == "zerocore"]
# Largest wanted relative difference of a step's loss.
WANTED = {"FSDP2": 1e-3, "DDP": 2e-2}


@cache
def python_text() -> Tensor:
    """Returns the bytes of Python's sources, as the examples train on them."""
    folder = str(Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("text_data").load_corpus().train


def random_batch(size: GPTSize, draw: torch.Generator) -> MicroBatch:
    """Draws windows of the text, with the next bytes as targets."""
    text = python_text()
    starts = torch.randint(len(text) - size.sequence, (size.batch, 1), generator=draw)
    windows = text[starts + torch.arange(size.sequence + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def train(system: System, size: GPTSize, num_steps: int, recipe: Recipe) -> list[float]:
    """Trains on Python's sources; returns each step's loss in nats per byte, mean over the ranks.

    Weights and batches depend only on the arguments and the rank.
    """
    torch.manual_seed(0)
    model = GPT(size)
    step = build_step(system, model, model.blocks, LEARNING_RATE, recipe)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(num_steps):
        losses.append(step([random_batch(size, draw) for _ in range(recipe.accumulate)]))
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Returns the largest difference of a step's loss, relative to `others`."""
    return max(abs(own - other) / other for own, other in zip(losses, others, strict=True))


def make_table(losses: dict[str, list[float]], size: GPTSize) -> Table:
    """Shows first and last losses, and the differences."""
    millions = sum(p.numel() for p in GPT(size).parameters()) / 1e6
    table = Table(
        f"{millions:.1f} M parameters, bf16, gradients reduced in fp32",
        ["system", "first loss", "last loss", *(f"largest difference to {n}" for n in WANTED)],
    )
    for label, own in losses.items():
        differences = [
            f"{largest_difference(own, losses[other]):.1e}" if other in losses else ""
            for other in WANTED
        ]
        table.add(label, f"{own[0]:.6f}", f"{own[-1]:.6f}", *differences)
    bounds = ", ".join(f"{bound:g} to {name}" for name, bound in WANTED.items())
    table.notes = [
        "Mean over the ranks; differences are relative to the loss of the same step, the largest "
        f"of all steps. Wanted of zerocore: at most {bounds}.",
        "FSDP2: MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32). zerocore: "
        "MixedPrecision(bf16, reduce_dtype=fp32). DDP: fp32 weights under bf16 autocast, which "
        "computes norms in fp32. All with torch's fused AdamW.",
    ]
    return table


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 50,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Trains every system alike and compares the losses step by step."""
    size = GPT_SIZES["10m"]
    losses: dict[str, list[float]] = {}
    with Results("parity_bf16", save) as results:
        for system in COMPARED:
            args = (system, size, steps, Recipe("bf16"))
            losses[system.label] = run_on_ranks(train, ranks, args, RUN_TIMEOUT_S)[0]
            results.write([make_table(losses, size)], {"num_ranks": ranks, "losses": losses})


if __name__ == "__main__":
    typer.run(main)
