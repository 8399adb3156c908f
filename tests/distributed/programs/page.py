"""The page of the documentation: of the full table, what is not exact under every system."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.distributed.programs.systems import PEERS
from tests.distributed.programs.table import read_markdown, read_titles

ROOT = Path(__file__).resolve().parents[3]
FULL = ROOT / "benchmarks" / "results" / "programs.md"
PAGE = ROOT / "docs" / "programs.md"

Rows = dict[str, dict[str, str]]  # [program][system]

HEAD = """# Programs that are not exact

Look here before you port a training loop: of {count} ordinary programs, which ones do not train
as plain replicas do, and why.

- `python -m tests.distributed.programs --only NAME`: one program under each system
- `python -m tests.distributed.programs --markdown`: all, writes this page and the full table

The [full table](../benchmarks/results/programs.md) has every program and says how it is measured,
with torch {torch}. *exact*: each number is that of plain replicas, to 1e-5. *refused*: all ranks
raise an error that is written for the reader. *error*: another exception on all ranks. *WRONG*:
another number, without a word.
"""
REFUSED = """
## Under zerocore

`offload0` offloads the states at stage 0, and `offload3` all at stage 3. Where DDP or FSDP2 is
exact, [Behaviour](behaviour.md) gives the reason of each refusal.

| program | what it does | ddp | fsdp2 | refused at | why |
|---|---|---|---|---|---|
"""
BESIDE = """
## Under DDP or FSDP2 only

Zerocore is exact at every stage and with offload.

| ddp | fsdp2 | programs |
|---|---|---|
"""


def as_page(full: str) -> str:
    """The page that goes with the full table."""
    torch, rows = read_markdown(full)
    parts = [HEAD.format(count=len(rows), torch=torch), _counts(rows)]
    parts += [REFUSED, _refused(rows, full), BESIDE, _beside(rows)]
    return "".join(parts)


def _counts(rows: Rows) -> str:
    counts = {s: Counter(row[s] for row in rows.values()) for s in next(iter(rows.values()))}
    kinds = list(dict.fromkeys(("exact", *(kind for count in counts.values() for kind in count))))
    lines = [f"| system | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    for system, count in counts.items():
        lines.append(f"| {system} | {' | '.join(str(count[kind]) for kind in kinds)} |")
    return "\n" + "\n".join(lines) + "\n"


def _inexact(row: dict[str, str]) -> list[str]:
    """The systems of zerocore that are not exact."""
    return [s for s, kind in row.items() if s not in PEERS and kind != "exact"]


def _refused(rows: Rows, full: str) -> str:
    titles, said = read_titles(full), _reasons(full)
    cells = [
        (name, titles[name], row["ddp"], row["fsdp2"], _where(row), said.get(name, ""))
        for name, row in rows.items()
        if _inexact(row)
    ]
    return "".join(f"| {' | '.join(each)} |\n" for each in cells)


def _where(row: dict[str, str]) -> str:
    ours = [system for system in row if system not in PEERS]
    where = _inexact(row)
    return "all" if where == ours else " ".join(where)


def _reasons(full: str) -> dict[str, str]:
    """The first sentence that zerocore says of each program."""
    reasons: dict[str, str] = {}
    for name, text in re.findall(r"^- (\w+), [\w ]+: \w+: (?:\w+: )?(.+)$", full, re.MULTILINE):
        sentence = re.split(r"[.:;] ", re.sub(r"^rank \d failed: \w+: ", "", text))[0]
        reasons.setdefault(name, sentence.removesuffix("."))
    return reasons


def _beside(rows: Rows) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        if not _inexact(row) and (row["ddp"], row["fsdp2"]) != ("exact", "exact"):
            groups.setdefault((row["ddp"], row["fsdp2"]), []).append(f"`{name}`")
    return "".join(
        f"| {ddp} | {fsdp2} | {', '.join(names)} |\n" for (ddp, fsdp2), names in groups.items()
    )
