"""Compares narrow dtypes on the wire: losses of a GPT, and steps of two nodes over a slow link.

Usage: python benchmarks/wires.py losses --ranks 2 --steps 200
       python benchmarks/wires.py speed --rate 1gbit     # root; Linux with ip and tc
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from bench.lib.models import GPT, GPT_SIZES, GPTSize
from bench.lib.nodes import nodes_class, run_on_nodes
from bench.lib.ranks import run_on_ranks
from bench.lib.results import Results
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table
from parity import python_text, random_batch

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = GPT_SIZES["10m"]
BASE = "bf16, gradients in fp32"
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    BASE: {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16 wires": {"param_dtype": BF16, "wire_dtype": BF16},
    "float8 gathers": {
        "param_dtype": BF16, "wire_dtype": BF16, "gather_dtype": torch.float8_e4m3fn,
    },
    "int8 gathers": {"param_dtype": BF16, "wire_dtype": BF16, "gather_dtype": torch.int8},
}  # fmt: skip
RUN_TIMEOUT_S = 1800.0
app = typer.Typer(add_completion=False, help=__doc__)


def make_step(name: str) -> Any:
    """Shards the GPT at stage 3 under a policy; returns it and its optimizer."""
    zerocore = import_zerocore()
    torch.manual_seed(0)
    model, options = GPT(SIZE), POLICIES[name]
    mixed = zerocore.MixedPrecision(**options) if options else None
    blocks = list(model.blocks)
    model = zerocore.shard(model, stage=3, units=blocks, mixed_precision=mixed)
    return model, zerocore.optim.AdamW(model.parameters(), lr=1e-3)


def train(name: str, num_steps: int, size: GPTSize = SIZE) -> tuple[list[float], list[float]]:
    """Trains the GPT; returns losses in nats per byte, means over ranks, and seconds of steps."""
    model, optimizer = make_step(name)
    losses: list[float] = []

    def step(batch: Any) -> None:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    seconds = timed(step, num_steps, size)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist(), seconds


def timed(step: Callable[[Any], None], num_steps: int, size: GPTSize) -> list[float]:
    """Returns the seconds of each step, which all ranks begin together."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    seconds = []
    for _ in range(num_steps):
        batch = random_batch(size, draw)
        dist.barrier()
        begin = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begin)
    return seconds


def compute(name: str, num_steps: int, size: GPTSize) -> list[float]:
    """Returns the seconds of a plain model's forward and backward in the policy's dtype."""
    model = GPT(SIZE).to(POLICIES[name].get("param_dtype", FP32))
    return timed(lambda batch: model(*batch).backward(), num_steps, size)


def smoothed(losses: Sequence[float], width: int = 10) -> list[float]:
    """Returns the running mean of the last steps."""
    return [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def draw_losses(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws the curves and, below, their differences from the curve of :data:`BASE`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True)
    base = smoothed(losses[BASE])
    for name, values in losses.items():
        curve = smoothed(values)
        top.plot(curve, label=name, linewidth=1)
        bottom.plot([a - b for a, b in zip(curve, base, strict=True)], linewidth=1)
    top.set_ylabel("loss, nats a byte (mean of 10 steps)")
    bottom.set_ylabel(f"minus '{BASE}'")
    bottom.set_xlabel("step")
    top.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@app.command()
def losses(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
) -> None:
    """Trains under each policy but fp32 and draws the losses."""
    python_text()
    found = {}
    with Results("wires_losses") as results:
        for name in list(POLICIES)[1:]:
            found[name] = run_on_ranks(train, ranks, (name, steps), RUN_TIMEOUT_S)[0][0]
            results.write([losses_table(found, steps)], {"num_ranks": ranks, "losses": found})
        draw_losses(found, results.file(".png"))


def losses_table(found: dict[str, list[float]], steps: int) -> Table:
    """Shows each policy's first and last losses."""
    last = steps // 10
    columns = ["policy", "first loss", f"mean of the last {last}", f"minus {BASE}"]
    table = Table("GPT of 10 M parameters at stage 3", columns)
    ends = {name: statistics.fmean(values[-last:]) for name, values in found.items()}
    for name, values in found.items():
        above = f"{ends[name] - ends[BASE]:+.4f}" if BASE in ends else ""
        table.add(name, f"{values[0]:.4f}", f"{ends[name]:.4f}", above)
    return table


@app.command(hidden=True)
def rank(name: str, steps: int, tokens: int) -> None:
    """Runs one rank of ``speed``, which starts it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dataclasses.replace(SIZE, batch=1, sequence=tokens)
    found = compute(name, steps, size), train(name, steps, size)[1]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


@app.command()
def speed(
    rate: Annotated[str, typer.Option(help="Rate of the link, in tc's units.")] = "1gbit",
    steps: Annotated[int, typer.Option(help="Timed steps of each turn.")] = 12,
    turns: Annotated[int, typer.Option(help="Turns of all policies.")] = 3,
    tokens: Annotated[int, typer.Option(help="Of a rank's step; few, so that wires count.")] = 32,
) -> None:
    """Times steps of two ranks in network namespaces, with the policies in turns."""
    alone: dict[str, list[float]] = {name: [] for name in POLICIES}
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    if (make_nodes := nodes_class()) is None:
        return
    title = (
        f"two nodes, {rate} between them: GPT of 10 M parameters at stage 3, {tokens} tokens each"
    )
    with Results(f"wires_{rate}") as results, make_nodes(2, rate) as nodes:
        for turn in range(turns):
            for number, name in enumerate(POLICIES):
                port = 29600 + turn * len(POLICIES) + number
                arguments = [__file__, "rank", name, str(steps + 3), str(tokens)]
                computing, stepping = run_on_nodes(nodes, arguments, port, RUN_TIMEOUT_S)
                alone[name] += computing[3:]
                found[name] += stepping[3:]
            raw = {"compute seconds": alone, "seconds": found}
            results.write([speed_table(title, found, alone)], raw)


def speed_table(title: str, found: dict[str, list[float]], alone: dict[str, list[float]]) -> Table:
    """Shows the times of steps and of compute alone, by policy."""
    table = Table(
        title,
        ["policy", "ms a step", "of fp32's", "fastest", "compute ms"],
    )
    middle = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        times = (middle[name], min(values), statistics.median(alone[name]))
        step, fastest, compute_alone = (f"{1e3 * seconds:.0f}" for seconds in times)
        share = f"{middle[name] / middle['fp32']:.2f}"
        table.add(name, step, share, fastest, compute_alone)
    table.notes = [
        f"Medians of {len(found[BASE])} steps; the policies ran in turn.",
        "Compute: a plain model's forward and backward in the policy's dtype, on both ranks at the "
        "same time. A processor without instructions for bf16 takes longer there than in fp32.",
    ]
    return table


if __name__ == "__main__":
    app()
