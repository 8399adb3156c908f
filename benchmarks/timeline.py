"""Draws one measured training step of rank 0, with lanes of modules, collectives, exposed waits.

python benchmarks/timeline.py --out docs/timeline.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import zerocore
from bench.lib.models import GPT, GPT_SIZES
from bench.lib.ranks import run_on_ranks
from zerocore.common.events import COLLECTIVES
from zerocore.reporting.timeline import WAIT, draw_timeline

NUM_WARMUP = 4


def record_step(stage: int, size_name: str) -> zerocore.reporting.Timeline:
    """Records the forward and backward of one steady step on this rank."""
    size = GPT_SIZES[size_name]
    torch.manual_seed(0)
    model = zerocore.shard(GPT(size), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(size.vocab_size, (2, size.sequence + 1))
    for _ in range(NUM_WARMUP):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    with zerocore.trace(model) as timeline:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return timeline


def main(
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("docs/timeline.png"),
    stage: Annotated[int, typer.Option(help="ZeRO stage.")] = 3,
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    size: Annotated[str, typer.Option(help="29m or small.")] = "29m",
) -> None:
    """Records a step on real gloo ranks and draws the one of rank 0."""
    timeline = run_on_ranks(record_step, ranks, (stage, size), timeout_s=120.0)[0]
    total = sum(b.end_ns - b.start_ns for b in timeline.boxes if b.lane in COLLECTIVES)
    exposed = sum(b.end_ns - b.start_ns for b in timeline.boxes if b.lane == WAIT)
    title = (
        f"measured: stage {stage}, GPT {size}, {ranks} gloo ranks on CPU; numbers are blocks; "
        f"collectives {total / 1e6:.0f} ms, exposed {exposed / 1e6:.0f} ms"
    )
    draw_timeline(timeline, out, title)
    typer.echo(f"{title}\nwrote {out}")


if __name__ == "__main__":
    typer.run(main)
