"""Compares the speed of this checkout's build with another commit's.

Usage: python benchmarks/speed.py [BASE] [--quick] [--save]
       make speed BASE=1a2b3c4d

Builds the commit outside of the checkout, runs both builds in turn in fresh processes and prints
ratios. Ends with status 1 if a row is slower, 2 if the commit cannot be compared.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import datetime, timezone
from statistics import median
from typing import Annotated

import typer

from bench.lib.results import RESULTS_FOLDER, hardware_slug
from bench.lib.tables import Table, make_console
from bench.speed import commits
from bench.speed.turns import Found, Row, measure
from bench.speed.verdict import ratio_of, verdict_of

PAGE = RESULTS_FOLDER / "speed.md"
THIS = "this checkout"
LIMIT_S, QUICK_LIMIT_S = 570.0, 170.0
MIN_RUNS = 5
ROWS = (
    *(Row(f"step, 29 M, stage {s}", f"29m/{s}", "gloo", "29m", 2, True) for s in (0, 2, 3)),
    *(
        Row(f"step, 12 narrow, stage {s}", f"small/{s}", "gloo", "small", 6, True)
        for s in (0, 2, 3)
    ),
    Row("first step, 12 narrow, stage 3", "first", "gloo", "small", 1),
    Row("host, block of 9 parameters", "host/block", "fake", "host", 10),
    Row("host, clip + step of AdamW", "host/clip", "fake", "host", 10),
    Row("save, 10 M, stage 3", "disk/save", "gloo", "disk", 2, True),
    Row("load, 10 M, stage 3", "disk/load", "gloo", "disk", 2, True),
    Row("export, 29 M, shard", "export/shard", "gloo", "export", 4, True),
    Row("export, 29 M, fsdp", "export/fsdp", "gloo", "export", 4, True),
)
QUICK = ("step, 29 M, stage 3", "host, block of 9 parameters")
BLOCKS = 32  # blocks of the model in the host rows
COLUMNS = ["row", "this", "base", "wall time", "CPU time", "peak MiB", "ratio", "runs", "verdict"]
NOTES = (
    "this, base: ms of a step (host: of 32 blocks): fastest of a turn, median of the turns, median "
    "of the runs. A run starts fresh processes of both builds, which take eight turns, ABBABAAB. "
    "Times are means over the ranks.",
    "Ratios: this by base, median over the runs of the ratio in a run. The interval in brackets "
    "holds the true median in 92 % of cases; with five runs it spans them all. CPU time: user and "
    "system, of all ranks.",
    "slower, faster: the interval excludes 1, and the ratio is more than 1.5 % away from 1. "
    "noise: after more runs the interval still reaches 2 % to each side, and does not leave out "
    "all ratios within 1.5 % of 1.",
    "29 M: GPT, 8 blocks of width 512; 12 narrow: GPT, 12 blocks of width 128; 2 gloo ranks with a "
    "thread each. host: collectives return at once. save, load: to a file system in memory. "
    "export: all weights to each rank, a bucket at a time.",
    "peak MiB: a rank's resident memory in the timed steps, less the memory before the model.",
)


def newest_measured() -> str:
    """Returns the commit of the newest table in the page."""
    text = PAGE.read_text() if PAGE.exists() else ""
    found = re.search(r"^## ([0-9a-f]{7,40})\b", text, re.MULTILINE)
    if found is None:
        raise commits.SpeedError(f"{PAGE.name} names no commit; name one: make speed BASE=<commit>")
    return found[1]


def is_noisy(_: Row, found: Found) -> bool:
    """Whether a row needs more runs."""
    return ratio_of(found.wall).verdict == "noise"


def row_cells(row: Row, found: Found) -> list[str]:
    """Returns the cells of a row, without its name."""
    wall, cpu = ratio_of(found.wall), ratio_of(found.cpu)
    own, base = (f"{median(times) / 1e3:.2f}" for times in found.wall)
    peaks = ["", ""]
    if row.with_peak:
        peaks = [f"{median(found.peak[0]):.0f}", str(ratio_of(found.peak))]
    return [own, base, str(wall), str(cpu), *peaks, str(len(found.wall[0])), verdict_of(wall, cpu)]


def make_table(rows: list[Row], found: dict[str, Found], title: str, load: float) -> Table:
    """Makes the table of all rows with their ratios."""
    table = Table(title, COLUMNS, notes=list(NOTES))
    for row in rows:
        table.add(row.name, *row_cells(row, found[row.name]))
    end = f"{load:.1f} when the run began, {os.getloadavg()[0]:.1f} when it ended"
    table.notes.append(f"{hardware_slug()}; load of the machine: {end}.")
    return table


def save_table(table: Table, found: dict[str, Found], base: str) -> None:
    """Adds the table before the tables of earlier commits, and writes its raw figures to a file."""
    head, _, earlier = (PAGE.read_text() if PAGE.exists() else PAGE_HEAD).partition("\n## ")
    text = f"{head.rstrip()}\n\n{table.markdown().strip()}\n"
    PAGE.write_text(f"{text}\n## {earlier}" if earlier else text)
    raw = {
        name: {"wall us": f.wall, "cpu us": f.cpu, "peak MiB": f.peak} for name, f in found.items()
    }
    record = {"commit": commits.head(), "base": base, "this, base": raw}
    PAGE.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


PAGE_HEAD = """# Speed, watched

`make speed BASE=<commit>` compares a checkout with a commit, by default with the first one
below. `speed.json` has the raw figures of the newest table.
"""


def compare(base: str, rows: list[Row], runs: int, limit_s: float, save: bool) -> bool:
    """Prints the table; returns False if a row is slower."""
    deadline = time.monotonic() + limit_s
    commit = commits.resolve(base or newest_measured())
    if save and commits.has_changes():
        raise commits.SpeedError("--save needs a commit: commit the changes first")
    if not [*(commits.ROOT / "zerocore").glob("_C.*.so")]:
        raise commits.SpeedError("this checkout is not built; `make build` builds it")
    console, load = make_console(), os.getloadavg()[0]
    name = commits.described(commit)
    console.print(f"base: {name}", markup=False)
    builds = {THIS: commits.ROOT, name: commits.build(commit)}
    found = measure(rows, builds, runs, deadline, is_noisy)
    here = commits.described("HEAD").split(": ")[0]
    changed = " with changes" if commits.has_changes() else ""
    title = f"{here}{changed}, measured {datetime.now(timezone.utc):%Y-%m-%d} beside {name}"
    table = make_table(rows, found, title, load)
    table.show(console)
    if save:
        save_table(table, found, commit)
    return not any(cells[-1].endswith("slower") for cells in table.rows)


def main(
    base: Annotated[str, typer.Argument(help="A commit; by default speed.md's newest.")] = "",
    quick: Annotated[bool, typer.Option(help="Two rows in three minutes.")] = False,
    only: Annotated[str, typer.Option(help="Rows whose names contain this.")] = "",
    runs: Annotated[
        int, typer.Option(min=MIN_RUNS, help="Runs of all rows, before more of noisy rows.")
    ] = MIN_RUNS,
    save: Annotated[bool, typer.Option(help="Write the table into results/speed.md.")] = False,
) -> None:
    """Compares this checkout's build with the build of the commit BASE."""
    rows = [row for row in ROWS if only in row.name and (not quick or row.name in QUICK)]
    if not rows:
        raise typer.BadParameter(f"no row has {only!r} in its name: {[row.name for row in ROWS]}")
    if save and len(rows) < len(ROWS):
        raise typer.BadParameter("--save needs all rows: leave out --only and --quick")
    try:
        fine = compare(base, rows, runs, QUICK_LIMIT_S if quick else LIMIT_S, save)
    except commits.SpeedError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
