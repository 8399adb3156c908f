"""Measures checkpoints of 2 ranks: saves and loads beside FSDP2 and the disk, stalls and bytes.

Usage: python benchmarks/checkpoint.py
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import track

from bench.checkpoint.cell import (
    DEEPSPEED,
    OWN,
    PEER,
    CheckpointCell,
    Figures,
    load_elsewhere,
    measure,
)
from bench.checkpoint.planning import plan_seconds
from bench.checkpoint.raw_disk import WAYS, WAYS_INTO_NEW
from bench.lib.ranks import run_on_ranks
from bench.lib.results import Results
from bench.lib.systems import is_installed
from bench.lib.tables import Table
from bench.lib.timing import fastest, ratio

WORLD_SIZE = 2
LIMIT_S = 1500.0
RATE_GOAL, PEER_GOAL, BYTES_GOAL, STALL_GOAL_MS, PLAN_GOAL_S = 0.9, 0.6, 1.01, 20.0, 2.0
WANTED = {
    "save": ("", "", f">= {RATE_GOAL}", "", f"<= {PEER_GOAL}"),
    "cold load": ("", "", f">= {RATE_GOAL}", f">= {RATE_GOAL}", f"<= {PEER_GOAL}"),
}
NOTES = (
    "Weights and both moments of AdamW in fp32, all ranks together; seconds until all ranks have "
    "ended, medians over rounds in which all take their turn. Ratios are medians of ratios in the "
    "same round.",
    "Every save ends with fsync of all files. zerocore also flushes and renames folders, and "
    "compares all checksums before it loads; torch does neither.",
    "A load resumes training: it goes into an existing model and an optimizer that "
    "has no states yet, so two thirds of the bytes go to memory that the load allocates.",
    "Cold: before each load the files are dropped from the page cache by "
    "posix_fadvise(DONTNEED). A disk of a virtual machine may have a cache of its own.",
    "The disk alone: each rank writes and reads its part of the bytes in one file, in calls of the "
    "size and number shown; the fastest way is its rate. Page cache: reads are announced as "
    "sequential, as zerocore's are. Warm: the files are read into the page cache before. A rate "
    "into existing memory is the disk's own. States in new memory: the rate of a plain reader "
    "that allocates as much memory as a load, without checksums.",
)


def fastest_of(figures: Figures, systems: list[str], what: str) -> str:
    """Returns the fastest of some systems, by its name in the figures."""
    return fastest(figures.seconds, [f"{name}: {what}" for name in systems])


def rates_table(cell: CheckpointCell, figures: Figures) -> Table:
    """Compares saves and loads with the disk's rate and the peers."""
    columns = ["what", "system", "s", "MB/s", "of the disk's rate", "... states in new memory"]
    columns.append("of the time of FSDP2 + DCP")
    table = Table(f"{WORLD_SIZE} ranks, {cell.nbytes / 1e6:.0f} MB", columns, notes=list(NOTES))
    disk, into_new = ([way.name for way in ways] for ways in (WAYS, WAYS_INTO_NEW))
    for what in ("save", "cold load", "warm load"):
        bases = [fastest_of(figures, disk, what)]
        bases += [] if what == "save" else [fastest_of(figures, into_new, what)]
        peers = (PEER, DEEPSPEED) if f"{DEEPSPEED}: {what}" in figures.seconds else (PEER,)
        for name in (*disk, *(into_new if what != "save" else ()), OWN, *peers):
            key = f"{name}: {what}"
            seconds = median(figures.seconds[key])
            shares = [f"{ratio(figures.seconds, base, key):.2f}" for base in bases]
            shares += [""] * (2 - len(shares))
            shares.append(f"{ratio(figures.seconds, key, f'{PEER}: {what}'):.2f}")
            table.add(what, name, f"{seconds:.2f}", f"{cell.nbytes / seconds / 1e6:.0f}", *shares)
        if what != "warm load":
            table.add(what, "wanted of zerocore", *WANTED[what])
    if not is_installed("deepspeed"):
        table.notes.append("DeepSpeed is not installed.")
    else:
        table.notes.append(
            "DeepSpeed writes files of each rank, without fsync, which is added here; it loads on "
            "the number of ranks that saved, into existing states, and verifies no checksums."
        )
    return table


def background_table(cell: CheckpointCell, ranks: list[Figures]) -> Table:
    """Shows how long training waits for background saves, and their memory."""
    table = Table("background saves", ["of a rank", "found", "wanted"])
    sizes = {"small: ": cell.nbytes_of(cell.small_blocks), "": cell.nbytes}
    own_gb = {label: nbytes / WORLD_SIZE / 1e9 for label, nbytes in sizes.items()}
    budget = max(cell.nbytes // 4, 16 << 20)
    for key in ("stall in save", "stall in all"):
        worst = {
            label: max(median(figures.seconds[label + key]) for figures in ranks) * 1e3
            for label in sizes
        }
        for label, gb in own_gb.items():
            table.add(f"{key}, {gb:.2f} GB, ms", f"{worst[label]:.1f}", "")
        per_gb = f"<= {STALL_GOAL_MS}"
        table.add(f"{key}, {own_gb['']:.2f} GB, ms per GB", f"{worst[''] / own_gb['']:.1f}", per_gb)
    held = max(figures.nbytes["held"] for figures in ranks)
    table.add("copies held at a time, MB", f"{held / 1e6:.0f}", f"<= {budget / 1e6:.0f}")
    table.add("a step without a save, ms", f"{median(ranks[0].seconds['step']) * 1e3:.0f}", "")
    table.notes.append(
        "In all: with the wait of an optimizer's step right after a save; the forward and "
        "backward between them are the time for the copies."
    )
    return table


def bytes_table(cell: CheckpointCell, found: dict[str, list[dict[str, int]]]) -> Table:
    """Shows the bytes that another number of ranks reads to load."""
    columns = ["2 ranks saved", "asked of the system", "of the state", "from the disk"]
    table = Table("bytes read on another number of ranks", [*columns, "of the state"])
    for label, ranks in found.items():
        cells = []
        for name in ("rchar", "read_bytes"):
            total = sum(counts[name] for counts in ranks)
            cells += [f"{total / 1e6:.1f} MB", f"{total / cell.nbytes:.3f}"]
        table.add(label, *cells)
    table.add("wanted without verify", "", f"<= {BYTES_GOAL}", "", f"<= {BYTES_GOAL}")
    table.notes.append(
        "All ranks together, from /proc/self/io. verify first reads every byte once, so that "
        "nothing is loaded from damaged files; then the load finds them in the page cache."
    )
    return table


def planning_table(seconds: dict[str, float]) -> Table:
    """Shows the planning of a 70B model with two moments on 1,024 ranks."""
    table = Table("planning: Llama 70B with AdamW, 1,024 ranks", ["what", "found", "wanted"])
    table.add("until every rank can write, s", f"{seconds['wait']:.2f}", f"<= {PLAN_GOAL_S}")
    table.add("metadata of all files, s", f"{seconds['metadata']:.2f}", "")
    table.add("... pickled, s", f"{seconds['pickle']:.2f}", "")
    table.add("pieces", f"{seconds['pieces']:,.0f}", "")
    table.add("MB of metadata", f"{seconds['metadata bytes'] / 1e6:.0f}", "")
    table.notes.append(
        "CPU seconds of one process, without communication. The metadata is made by the first "
        "rank's thread, when its data is written, while training goes on."
    )
    return table


def main(
    blocks: Annotated[int, typer.Option(help="Blocks of 12.6 million parameters.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds in which each system takes its turn.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the speed of checkpoints, and how long training waits for them."""
    place = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
    cell = CheckpointCell(str(place), blocks, rounds)
    cases = [(n, verify) for n in (1, 3) for verify in (False, True)]
    elsewhere: dict[str, Any] = {}
    with Results("checkpoint", save) as results:
        try:
            ranks = run_on_ranks(measure, WORLD_SIZE, (cell,), LIMIT_S)
            raw: dict[str, Any] = {"cell": {**asdict(cell), "folder": ""}, "elsewhere": elsewhere}
            raw["ranks"] = [asdict(figures) for figures in ranks]
            tables = [rates_table(cell, ranks[0]), background_table(cell, ranks)]
            results.write(tables, raw)
            for n, verify in track(cases, "other ranks", transient=True):
                label = f"{n} rank{'s' if n > 1 else ''}{', verify' if verify else ''}"
                elsewhere[label] = run_on_ranks(load_elsewhere, n, (cell, verify), LIMIT_S)
        finally:
            shutil.rmtree(place)
        planning = plan_seconds(1024)
        tables += [bytes_table(cell, elsewhere), planning_table(planning)]
        results.write(tables, {**raw, "planning": planning})


if __name__ == "__main__":
    typer.run(main)
