"""Trains a model whose weights and moments exceed the memory that this process may allocate.

Usage: python benchmarks/bigger_than_memory.py --folder /a/folder/on/the/disk
"""

from __future__ import annotations

import math
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

import zerocore
from bench.lib.results import Results
from bench.lib.tables import Table
from bench.memory.sampler import CpuMemory, Sampler
from bench.offload.disk import MIB, RawDisk
from bench.offload.training import gpt, loss_of

WIDTH, HEADS, VOCABULARY = 1024, 16, 8192
BLOCK_NUMEL = 12 * WIDTH**2 + 13 * WIDTH
RAW_MIB = 256
NOTES = (
    "zerocore.shard(stage=3, offload=zerocore.Offload(states='disk', gradients='cpu', "
    "parameters='disk')) on one rank; fp32, zerocore.optim.AdamW with clipping, batch 1. The limit "
    "is the system's on private memory (RLIMIT_DATA); larger allocations fail.",
    "MB/s: bytes that the disk read and wrote, by the kernel's counts of this process, a second of "
    "all steps but the first. Of raw: the time of plain direct reads and writes of as many bytes "
    f"of a file of {RAW_MIB} MiB right after, in the best of three ways, / the steps' time.",
)


@dataclass
class Moved:
    """Bytes that this process has read from and written to disks so far."""

    read: int
    written: int

    @staticmethod
    def now() -> Moved:
        """Returns the kernel's counts."""
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return Moved(int(counts["read_bytes"]), int(counts["write_bytes"]))


@dataclass
class Run:
    """The figures of a run."""

    limit_nbytes: int
    numel: int = 0
    file_nbytes: int = 0
    losses: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # the end of each step
    moved: list[Moved] = field(default_factory=list)  # at the end of each step
    samples: list[tuple[float, int]] = field(default_factory=list)  # seconds, resident bytes
    raw_read: float = 0.0  # bytes per second
    raw_write: float = 0.0

    @property
    def peak_nbytes(self) -> int:
        """The peak of resident bytes."""
        return max(nbytes for _, nbytes in self.samples)

    @property
    def step_s(self) -> float:
        """The median seconds of all steps but the first."""
        return median(b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False))

    @property
    def disk_rate(self) -> float:
        """The disk's bytes per second."""
        first, last = self.moved[0], self.moved[-1]
        nbytes = last.read + last.written - first.read - first.written
        return nbytes / (self.ends_s[-1] - self.ends_s[0])

    @property
    def share_of_raw(self) -> float:
        """The time of plain transfers of the same bytes, per time of the steps."""
        first, last = self.moved[0], self.moved[-1]
        raw_s = (last.read - first.read) / self.raw_read
        raw_s += (last.written - first.written) / self.raw_write
        return raw_s / (self.ends_s[-1] - self.ends_s[0])


def train(folder: Path, run: Run, num_blocks: int, tokens: int, steps: int) -> None:
    """Trains on one random batch and samples resident memory."""
    torch.manual_seed(0)
    batch = torch.randint(0, VOCABULARY, (1, tokens))
    with torch.device("meta"):
        model = gpt(num_blocks, WIDTH, HEADS, VOCABULARY)
    run.numel = sum(param.numel() for param in model.parameters())
    everything = zerocore.Offload("disk", gradients="cpu", parameters="disk", path=str(folder))
    start = time.perf_counter_ns()
    with Sampler(CpuMemory(), 0.05) as sampler:
        names = [name for name, _ in model.named_children()]
        zerocore.shard(model, stage=3, units=names, device=torch.device("cpu"), offload=everything)
        optimizer = zerocore.optim.AdamW(model.parameters(), lr=3e-4, clip_grad_norm=1.0)
        for _ in range(steps):
            loss = loss_of(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            run.losses.append(loss.item())
            run.ends_s.append((time.perf_counter_ns() - start) / 1e9)
            run.moved.append(Moved.now())
        optimizer.synchronize()
    run.file_nbytes = zerocore.memory_usage(model, optimizer).disk
    run.samples = [((s.time_ns - start) / 1e9, s.outside) for s in sampler.samples]


def measure_raw(folder: Path, run: Run) -> None:
    """Measures plain direct reads and writes of a file, in the best way."""
    disk = RawDisk(folder, RAW_MIB * MIB)
    rates = disk.measure(3)
    disk.close()
    run.raw_read, run.raw_write = rates["read"], rates["write"]


def make_table(run: Run) -> Table:
    """Makes a table of one row."""
    columns = ["parameters", "GB on disk", "limit GB", "most resident GB", "s a step", "MB/s"]
    table = Table("bigger than memory", [*columns, "of raw", "losses"], notes=list(NOTES))
    giga = [run.file_nbytes, run.limit_nbytes, run.peak_nbytes]
    cells = [f"{run.numel / 1e6:.0f} M", *(f"{nbytes / 1e9:.2f}" for nbytes in giga)]
    losses = f"{run.losses[0]:.2f} to {run.losses[-1]:.2f}"
    cells += [f"{run.step_s:.1f}", f"{run.disk_rate / 1e6:.0f}", f"{run.share_of_raw:.2f}"]
    table.add(*cells, losses)
    return table


def draw(run: Run, path: Path) -> None:
    """Draws resident memory over time, with the ends of the steps."""
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
    folder: Annotated[str, typer.Option(help="On the disk; default: temporary files'.")] = "",
    millions: Annotated[int, typer.Option(help="Parameters.")] = 350,
    limit_gb: Annotated[float, typer.Option(help="Limit of private memory in GB.")] = 3.0,
    steps: Annotated[int, typer.Option(help="Steps on the same batch.")] = 6,
    tokens: Annotated[int, typer.Option(help="Tokens in the batch.")] = 64,
    save: Annotated[bool, typer.Option(help="Write dated files into results/.")] = True,
) -> None:
    """Trains under the limit, and prints its time and memory."""
    num_blocks = math.ceil((millions * 10**6 - 2 * VOCABULARY * WIDTH) / BLOCK_NUMEL)
    run = Run(int(limit_gb * 1e9))
    resource.setrlimit(resource.RLIMIT_DATA, (run.limit_nbytes, run.limit_nbytes))
    with (
        Results("bigger_than_memory", save) as results,
        tempfile.TemporaryDirectory(dir=folder or None) as place,
    ):
        train(Path(place), run, num_blocks, tokens, steps)
        measure_raw(Path(place), run)
        moved = [vars(each) for each in run.moved]
        results.write([make_table(run)], {**vars(run), "moved": moved})
        if save:
            draw(run, results.file(".png"))


if __name__ == "__main__":
    typer.run(main)
