"""Renders tables as text, with rich if it is installed, otherwise with spaces."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

WIDTH = 120


def print_table(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Prints a table as wide as the terminal; :data:`WIDTH` columns without one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(render_table(on_terminal(title), rows, notes, width))


def on_terminal(text: str) -> str:
    """Escapes the characters that a terminal could take for commands."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def render_table(
    title: str, rows: Sequence[Sequence[str]], notes: Sequence[str] = (), width: int = WIDTH
) -> str:
    """Returns the table; the first row names the columns, the first column is left-aligned."""
    lines = [f"  {on_terminal(note)}" for note in notes]
    rows = [[on_terminal(cell) for cell in row] for row in rows]
    return "\n".join([title, _drawn(rows, width) or _plain(rows), *lines])


def _drawn(rows: Sequence[Sequence[str]], width: int) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return ""
    table = Table()
    for index, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row))  # a name is not markup
    text = io.StringIO()
    # In a notebook, rich would also show the table itself, but not in a forked rank.
    Console(file=text, width=width, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _plain(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)
