"""Draws one measured training step: collectives and exposed waits of rank 0 as lanes.

python benchmarks/timeline.py --out docs/timeline.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import typer
from _models import GPT, GPT_SIZES
from _ranks import run_on_ranks
from _timeline import COLLECTIVES, boxes_of, draw_boxes

import zerocore

NUM_WARMUP = 4


def record_step(stage: int, size_name: str) -> list[zerocore.Event]:
    """Events of one steady step on this rank."""
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
    with zerocore.record_events(model) as events:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return events


def draw(events: list[zerocore.Event], title: str, path: Path) -> None:
    """A lane per kind of collective, one for the waits of the host, and below the pool's bytes."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(12, 4.2), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    start = draw_boxes(top, boxes_of(events))
    top.set_title(title, fontsize=10)
    times = [(event.issued_ns - start) / 1e6 for event in events]
    pool = [event.pool_nbytes / 2**20 for event in events]
    bottom.fill_between(times, pool, step="post", color="tab:gray", alpha=0.6)
    bottom.set_ylabel("pool, MiB")
    bottom.set_xlabel("ms since the first collective")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("docs/timeline.png"),
    stage: Annotated[int, typer.Option(help="ZeRO stage.")] = 3,
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    size: Annotated[str, typer.Option(help="29m or small.")] = "29m",
) -> None:
    """Records a step on real gloo ranks and draws rank 0's."""
    events = run_on_ranks(record_step, ranks, (stage, size), timeout_s=120.0)[0]
    collectives = [event for event in events if event.op in COLLECTIVES]
    total = sum(event.done_ns - event.issued_ns for event in collectives)
    exposed = sum(event.wait_ns for event in collectives)
    title = (
        f"measured: stage {stage}, GPT {size}, {ranks} gloo ranks on CPU; numbers are blocks; "
        f"collectives {total / 1e6:.0f} ms, exposed {exposed / 1e6:.0f} ms"
    )
    draw(events, title, out)
    typer.echo(f"{title}\nwrote {out}")


if __name__ == "__main__":
    typer.run(main)
