"""Presents the results of a training run: tables for the terminal, a dict for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from stage_figures import MEMORY_KINDS, StageFigures


@dataclass(frozen=True)
class RunSummary:
    """One run on rank 0; losses in nats per byte, `figures` one entry per stage in order."""

    settings: dict[str, Any]
    losses: list[float]
    held_out_before: float
    held_out_after: float
    seconds: float
    tokens_per_second: float
    prompt: bytes
    sample: bytes
    figures: list[StageFigures]

    def to_json(self) -> dict[str, Any]:
        """Returns all results as plain lists, dicts, strings and numbers."""
        return {
            "settings": self.settings,
            "losses": self.losses,
            "held_out_loss": {"before": self.held_out_before, "after": self.held_out_after},
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "sample": {"prompt": printable(self.prompt), "text": printable(self.sample)},
            "stages": [_stage_json(entry, self._is_trained(entry)) for entry in self.figures],
        }

    def print(self, console: Console) -> None:
        """Prints the sample, the losses and both tables."""
        sample = Text(printable(self.prompt), "bold") + Text(printable(self.sample))
        console.print(Panel(sample, title="generated text"))
        console.print(
            f"held-out loss {self.held_out_before:.3f} -> [bold]{self.held_out_after:.3f}[/] nats "
            f"per byte; {len(self.losses)} steps in {self.seconds:.0f} s, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        console.print(self._memory_table())
        if any(entry.collectives for entry in self.figures):  # a single rank has none
            console.print(self._collectives_table())

    def _is_trained(self, entry: StageFigures) -> bool:
        return entry.stage == self.settings["stage"]

    def _memory_table(self) -> Table:
        title = "Bytes on rank 0 (* trained here; other stages: two steps each)"
        table = _table(title, "stage", "")
        for kind in (*MEMORY_KINDS, "total"):
            table.add_column(kind, justify="right")
        for entry in self.figures:
            stage = f"{entry.stage}{' *' if self._is_trained(entry) else ''}"
            table.add_row(stage, "measured", *_nbytes_cells(entry.measured_nbytes))
            table.add_row("", "predicted", *_nbytes_cells(entry.predicted_nbytes), style="dim")
            table.add_section()
        return table

    def _collectives_table(self) -> Table:
        title = "Collectives per step (one figure where measured = predicted)"
        table = _table(title, "stage", "collective")
        for name in ("number", "bytes", "in flight ms", "exposed ms", "hidden %"):
            table.add_column(name, justify="right")
        for entry in self.figures:
            stage = f"{entry.stage}{' *' if self._is_trained(entry) else ''}"
            for name, row in entry.collectives.items():
                hidden = "-" if row.hidden_percent is None else f"{row.hidden_percent:.0f}"
                table.add_row(
                    stage,
                    name.replace("_", "-"),
                    _beside(row.num_calls, row.predicted_num_calls),
                    _beside(row.nbytes, row.predicted_nbytes),
                    f"{row.in_flight_ms:.1f}",
                    f"{row.exposed_ms:.1f}",
                    hidden,
                )
                stage = ""
            table.add_section()
        return table


def _table(title: str, *labels: str) -> Table:
    """Makes an empty table that leaves room for figures in 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for label in labels:
        table.add_column(label, no_wrap=True)
    return table


def printable(text: bytes) -> str:
    """Decodes text; replaces other bytes, and terminal controls, by a replacement character."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


def _nbytes_cells(nbytes: dict[str, int]) -> list[str]:
    return [f"{value:,}" for value in (*nbytes.values(), sum(nbytes.values()))]


def _beside(measured: float, predicted: int) -> str:
    """Returns one figure if both agree, else both."""
    if measured == predicted:
        return f"{predicted:,}"
    return f"[red]{measured:,.1f} != {predicted:,}[/]"


def _stage_json(entry: StageFigures, trained: bool) -> dict[str, Any]:
    collectives = {
        name: asdict(row) | {"hidden_percent": row.hidden_percent}
        for name, row in entry.collectives.items()
    }
    return asdict(entry) | {"trained": trained, "collectives": collectives}
