"""A live view of a running job: follows the lines that each rank's ``FigureLog`` appends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from zerocore.common.quantities import format_nbytes, format_number
from zerocore.reporting.figures import PREFIX

NUM_UNITS = 12
"""Units that are shown, those that compute waits for the longest."""

Line = dict[str, Any]


class Run:
    """The last line of each rank's file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.lines: dict[int, Line] = {}
        self.units: dict[int, dict[str, float]] = {}

    def read(self) -> None:
        """Reads the new lines; one that is not complete is left for the next time. Raises
        FileNotFoundError for no folder."""
        if not self._folder.is_dir():
            raise FileNotFoundError(f"'{self._folder}' is no folder; zerocore.FigureLog makes it")
        for path in self._folder.glob("figures-*.jsonl"):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size < offset:  # begun again
                offset = 0
            with open(path, "rb") as file:
                file.seek(offset)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            for line in complete.splitlines():
                self._take(json.loads(line))

    def _take(self, line: Line) -> None:
        rank = line["rank"]
        self.lines[rank] = line
        if line["units"]:
            self.units[rank] = {name: unit["exposed_ms"] for name, unit in line["units"].items()}


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step", "step", format_number(0)),
    ("ms", "step_ms", format_number(1)),
    ("tokens/s", "tokens_per_s", format_number(0)),
    ("MFU %", "mfu", format_number(1, 100)),
    ("exposed ms", "exposed_ms", format_number(1)),
    ("overlap %", "overlap", format_number(0, 100)),
    ("parameters", "memory/parameters", format_nbytes),
    ("gradients", "memory/gradients", format_nbytes),
    ("optimizer", "memory/optimizer", format_nbytes),
    ("pool", "pool_nbytes", format_nbytes),
    ("allocated", "memory/allocated_peak", format_nbytes),
    ("resident", "memory/resident_peak", format_nbytes),
    ("host", "memory/host", format_nbytes),
)


def ranks_table(run: Run, now: float) -> Table:
    """A row for each rank; columns that no rank has are left out."""
    lines = [run.lines[rank] for rank in sorted(run.lines)]
    world_size, model = lines[-1]["world_size"], lines[-1]["model"]
    rates = [line.get(f"{PREFIX}tokens_per_s") for line in lines]
    total = f", {sum(filter(None, rates)):,.0f} tokens/s" if any(rates) else ""
    table = Table(title=f"{model}: {len(lines)} of {world_size} ranks{total}", title_justify="left")
    known = [c for c in _COLUMNS if any(line.get(f"{PREFIX}{c[1]}") for line in lines)]
    for name in ("rank", *(name for name, *_ in known), "seconds ago"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        cells = [
            "-" if (value := line.get(f"{PREFIX}{key}")) is None else show(value)
            for _, key, show in known
        ]
        table.add_row(str(line["rank"]), *cells, f"{max(0.0, now - line['time']):.0f}")
    return table


def units_table(run: Run) -> Table:
    """Exposed time by unit, over the ranks: mean, most, and the rank that has the most."""
    table = Table(title="exposed ms by unit", title_justify="left")
    table.add_column("unit")
    for name in ("mean", "most", "of rank"):
        table.add_column(name, justify="right")
    names = dict.fromkeys(name for units in run.units.values() for name in units)
    times = {
        name: {rank: units[name] for rank, units in run.units.items() if name in units}
        for name in names
    }
    longest = sorted(times, key=lambda name: -max(times[name].values()))[:NUM_UNITS]
    for name in names:
        if name in longest:
            found = times[name]
            worst = max(found, key=lambda rank: found[rank])
            mean = sum(found.values()) / len(found)
            table.add_row(name, f"{mean:.2f}", f"{found[worst]:.2f}", str(worst))
    if len(names) > len(longest):
        table.caption = f"{len(longest)} of {len(names)} units"
    return table


def view(run: Run) -> Group | str:
    """Both tables, or a sentence while there is nothing to show."""
    if not run.lines:
        return "waiting for figures-RANK.jsonl of zerocore.FigureLog"
    tables = [ranks_table(run, time.time())]
    if run.units:
        tables.append(units_table(run))
    return Group(*tables)


def follow(folder: Path, interval: float, once: bool, console: Console | None = None) -> None:
    """Shows the run of a folder until it is interrupted, every ``interval`` seconds; once where
    that is asked for, or without a terminal. Raises FileNotFoundError for no such folder."""
    console, run = console or Console(), Run(folder)
    run.read()
    if once or not console.is_terminal:
        console.print(view(run))
        return
    with Live(view(run), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            run.read()
            live.update(view(run), refresh=True)
