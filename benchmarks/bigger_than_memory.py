"""Trains a model whose weights and moments are larger than the memory that this process may take.

Usage: python benchmarks/bigger_than_memory.py --folder /a/folder/on/the/disk
"""

from __future__ import annotations

import math
import os
import resource
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure

from bench.lib.results import RESULTS_FOLDER, write_results
from bench.lib.tables import Table, make_console
from bench.memory.sampler import CpuMemory, Sampler
from bench.offload.training import SwappedModel, gpt

WIDTH, HEADS, VOCABULARY = 1024, 16, 8192
BLOCK_NUMEL = 12 * WIDTH**2 + 13 * WIDTH
STATES = 3  # weight and two moments; a fourth, the gradient, is of one unit at a time
NOTES = (
    "fp32, AdamW, batch 1; plain torch over zerocore's swapped units, without shard(). The limit "
    "is the system's on private memory (RLIMIT_DATA): what asks for more gets an error. Past the "
    "page cache, so the file takes no memory either.",
    "MB/s: bytes read and written by the disk, by the kernel's counts of this process, per time of "
    "all but the first step.",
)


@dataclass
class Run:
    """What a run did."""

    numel: int
    limit_nbytes: int
    file_nbytes: int = 0
    losses: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # of the steps
    disk_nbytes: list[int] = field(default_factory=list)  # moved by the end of each
    samples: list[tuple[float, int]] = field(default_factory=list)  # second, resident bytes

    @property
    def peak_nbytes(self) -> int:
        """Most resident bytes."""
        return max(nbytes for _, nbytes in self.samples)

    @property
    def step_s(self) -> float:
        """Of all steps but the first one, the median."""
        return median(b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False))

    @property
    def disk_rate(self) -> float:
        """Bytes per second."""
        seconds = self.ends_s[-1] - self.ends_s[0]
        return (self.disk_nbytes[-1] - self.disk_nbytes[0]) / seconds


def disk_nbytes() -> int:
    """Read from and written to disks by this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def train(folder: Path, run: Run, num_blocks: int, tokens: int, steps: int) -> None:
    """Trains on one random batch, sampling resident memory."""
    torch.manual_seed(0)
    batch = torch.randint(0, VOCABULARY, (1, tokens))
    start = time.perf_counter_ns()
    with Sampler(CpuMemory(), 0.05) as sampler:
        model = SwappedModel(folder, lambda: gpt(num_blocks, WIDTH, HEADS, VOCABULARY))
        run.file_nbytes = model.weights.file_nbytes + model.moments.file_nbytes
        for _ in range(steps):
            run.losses.append(model.step(batch).item())
            run.ends_s.append((time.perf_counter_ns() - start) / 1e9)
            run.disk_nbytes.append(disk_nbytes())
    run.samples = [((s.time_ns - start) / 1e9, s.outside) for s in sampler.samples]


def make_table(run: Run) -> Table:
    """One row."""
    columns = ["parameters", "GB of states", "limit GB", "most resident GB", "s a step", "MB/s"]
    table = Table("bigger than memory", [*columns, "losses"], notes=list(NOTES))
    giga = [run.file_nbytes, run.limit_nbytes, run.peak_nbytes]
    cells = [f"{run.numel / 1e6:.0f} M", *(f"{nbytes / 1e9:.2f}" for nbytes in giga)]
    losses = f"{run.losses[0]:.2f} to {run.losses[-1]:.2f}"
    table.add(*cells, f"{run.step_s:.1f}", f"{run.disk_rate / 1e6:.0f}", losses)
    return table


def draw(run: Run, path: Path) -> None:
    """Resident memory over time, with the ends of the steps."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([t for t, _ in run.samples], [n / 1e9 for _, n in run.samples], label="resident")
    axes.axhline(run.limit_nbytes / 1e9, color="tab:red", label="limit")
    axes.axhline(run.file_nbytes / 1e9, color="tab:gray", ls="--", label="weights and moments")
    for end in run.ends_s:
        axes.axvline(end, color="lightgray", lw=0.8, zorder=0)
    axes.set(xlabel="seconds; a line ends each step", ylabel="GB", ylim=(0, None))
    axes.legend(loc="center right")
    figure.savefig(path, dpi=120)


def main(
    folder: Annotated[str, typer.Option(help="On the disk; default: for temporary files.")] = "",
    millions: Annotated[int, typer.Option(help="Parameters.")] = 350,
    limit_gb: Annotated[float, typer.Option(help="Private memory of this process.")] = 3.0,
    steps: Annotated[int, typer.Option(help="Steps on the same batch.")] = 6,
    tokens: Annotated[int, typer.Option(help="Of the batch.")] = 64,
    save: Annotated[bool, typer.Option(help="Write dated files into results/.")] = True,
) -> None:
    """Trains under the limit, and prints what it took."""
    console, load = make_console(), os.getloadavg()[0]
    num_blocks = math.ceil((millions * 10**6 - 2 * VOCABULARY * WIDTH) / BLOCK_NUMEL)
    run = Run(num_blocks * BLOCK_NUMEL + 2 * VOCABULARY * WIDTH, int(limit_gb * 1e9))
    resource.setrlimit(resource.RLIMIT_DATA, (run.limit_nbytes, run.limit_nbytes))
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        train(Path(place), run, num_blocks, tokens, steps)
    table = make_table(run)
    table.notes.append(f"Load of the machine at the start: {load:.1f}.")
    table.show(console)
    if save:
        raw = {"load_at_start": load, **vars(run)}
        paths = write_results("bigger_than_memory", raw, table.markdown())
        paths.append(RESULTS_FOLDER / f"{paths[0].stem}.png")
        draw(run, paths[-1])
        console.print(f"written: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    typer.run(main)
