"""The table as text, and as Markdown that can be read back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import torch

from tests.distributed.programs.registry import Program
from tests.distributed.programs.suite import Table
from tests.distributed.programs.systems import PEERS

Page = tuple[str, dict[str, dict[str, str]]]  # the version of torch; [program][system]

HEAD = """# Ordinary programs under each system

Written by `python -m tests.distributed.programs --markdown`; a test compares the
columns of plain, the stages and offload with what is measured. Two ranks on gloo, torch {torch};
with offload AdamW is zerocore's, and at stage 0 states, at stage 3 all leave for the host. The
truth is plain replicas whose gradients are averaged by hand; *exact* means that every number the
program sees and the parameters at its end are those, to 1e-5. *refused* is an exception on all
ranks that was written for the reader, and *error* one that was not. Before torch 2.13 to read what
nobody may read is a crash instead of an error.
"""


def as_text(table: Table, programs: dict[str, Program]) -> str:
    """For a terminal: the table, what is not exact, and how many of each kind."""
    systems = list(next(iter(table.values()), {}))
    width = max((len(name) for name in table), default=0)
    lines = [f"{'program':{width}}  " + "  ".join(f"{system:7}" for system in systems)]
    for name, row in table.items():
        cells = "  ".join(f"{row[system].kind:7}" for system in systems)
        lines.append(f"{name:{width}}  {cells}")
    lines.append("")
    lines += [f"{name}, {where}: {text[:300]}" for name, where, text in reasons(table)] + [""]
    for system in systems:
        kinds = Counter(row[system].kind for row in table.values())
        lines.append(f"{system}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    return "\n".join(lines)


def as_markdown(table: Table, programs: dict[str, Program]) -> str:
    """The full table, and what zerocore says when it refuses."""
    systems = list(next(iter(table.values()), {}))
    lines = [HEAD.format(torch=torch_version())]
    lines.append(f"| program | what it does | {' | '.join(systems)} |")
    lines.append("|---|---|" + "---|" * len(systems))
    for name, row in table.items():
        cells = " | ".join(row[system].kind for system in systems)
        lines.append(f"| {name} | {plain_words(programs[name].title)} | {cells} |")
    lines += ["", "## Errors of zerocore", ""]
    refused = {
        name: {s: v for s, v in row.items() if s not in PEERS and v.kind == "refused"}
        for name, row in table.items()
    }
    for name, where, text in reasons(refused):
        lines.append(f"- {name}, {where}: {plain_words(text)}")
    return "\n".join(lines) + "\n"


def reasons(table: Table) -> Iterator[tuple[str, str, str]]:
    """Of what is not exact: the program, the systems that say the same, and what they say."""
    for name, row in table.items():
        said: dict[str, list[str]] = {}
        for system, verdict in row.items():
            if verdict.kind != "exact":
                said.setdefault(f"{verdict.kind}: {verdict.detail}", []).append(system)
        yield from ((name, " ".join(where), text) for text, where in said.items())


def plain_words(text: str) -> str:
    """Words that are neither a link nor a cell's end in Markdown."""
    return text.replace("](", "] (").replace("|", "/")


def torch_version() -> str:
    """Major and minor."""
    return ".".join(torch.__version__.split(".")[:2])


def read_markdown(text: str) -> Page:
    """The version of torch a table was written with, and its rows as [program][system]."""
    version = re.search(r"torch (\d+\.\d+)", text)
    rows = _rows(text)
    if version is None or not rows:
        raise ValueError("this page holds no table of programs")
    systems = rows[0][2:]
    return version[1], {row[0]: dict(zip(systems, row[2:], strict=True)) for row in rows[1:]}


def read_titles(text: str) -> dict[str, str]:
    """The description of each program of a table."""
    return {row[0]: row[1] for row in _rows(text)[1:]}


def _rows(text: str) -> list[list[str]]:
    return [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
