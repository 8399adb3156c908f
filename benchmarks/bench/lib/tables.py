"""A table that is printed on the terminal and written as markdown."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable

# Wide enough for every table if the output is not a terminal.
FILE_WIDTH = 120


def make_console() -> Console:
    """Makes a console as wide as the terminal, or as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


@dataclass
class Table:
    """A title, column names, rows of cells, notes. The first column is text, the rest numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Appends a row; missing cells at the end stay empty."""
        self.rows.append([*cells, *[""] * (len(self.columns) - len(cells))])

    def show(self, console: Console) -> None:
        """Prints the table."""
        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, markup=False)

    def markdown(self) -> str:
        """Returns the table as a markdown section."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", *[f"- {note}" for note in self.notes], ""]
        return "\n".join(lines)
