"""The table of public optimizers, as Markdown."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable

from tests.distributed.optimizers.listed import LEFT_OUT, Listed
from tests.distributed.optimizers.trained import AGAIN, STEPS
from tests.distributed.programs.suite import Table, Verdict
from tests.distributed.programs.table import plain_words

STAGES = ("stage0", "stage1", "stage2", "stage3", "states3")
KINDS = ("exact", "by owned", "rounding", "refused", "error", "WRONG", "hang", "crash")

HEAD = """# Public optimizers under each stage

Written by `python -m tests.distributed.optimizers --markdown`, with torch {torch}. Each optimizer
trains a small net for {steps} steps on two ranks over gloo: an embedding, a convolution, a norm
and linear layers, which the ranks cut unevenly. The truth is plain replicas whose gradients are
averaged by hand. Learning rates are 0.01, other options mostly the defaults; wrappers are around
SGD. `torch.compile` is off. `states3` is stage 3 with `Offload(states="cpu")`.

*exact*: every loss and the full weights at the end are those, to 1e-5. *by owned*: so with
`zerocore.matrices.owned` at stage 3, and not without. *rounding*: another number
in float32, and in float64 the same as plain replicas in float64. *refused*: all ranks raise
an error that is written for the reader. *error*: another exception. *WRONG*: another number,
without a word. *loaded*: half-way, `zerocore.full_optimizer_state_dict` is loaded into a new
optimizer.
"""


def trains_plainly(table: Table, name: str) -> bool:
    """Whether plain replicas train with it."""
    return table[name]["plain"].kind == "exact"


def kind_of(row: dict[str, Verdict], system: str) -> str:
    """The table's word for a result."""
    kind = row[system].kind
    by_owned = system == "stage3" and kind != "exact" and "owned3" in row
    by_owned = by_owned and row["owned3"].kind == "exact"
    return "by owned" if by_owned else kind


def as_markdown(table: Table, listed: Iterable[Listed], torch: str) -> str:
    """The whole page."""
    known = [of for of in listed if trains_plainly(table, of.name)]
    failed = [of for of in listed if not trains_plainly(table, of.name)]
    exact = [of for of in known if _inexact(table, of.name) == []]
    lines = [HEAD.format(torch=torch, steps=STEPS), *_counts(table, known), ""]
    lines += ["## Exact at every stage, with offload and loaded", "", _by_package(exact), ""]
    lines += ["## Not exact somewhere", "", "| optimizers | where | result |", "|---|---|---|"]
    lines += _rows(table, known)
    lines += ["", "## Left out", "", "Plain replicas do not train with these here."]
    lines += ["", "| optimizer | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in LEFT_OUT.items()]
    lines += [f"| {of.name} | {_reason(table[of.name]['plain'])} |" for of in failed]
    return "\n".join(lines) + "\n"


def _counts(table: Table, known: list[Listed]) -> list[str]:
    lines = [f"| {len(known)} optimizers | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for after in ("", AGAIN):
        rows = [table[of.name + after] for of in known if trains_plainly(table, of.name + after)]
        for system in (system for system in STAGES if all(system in row for row in rows)):
            counts = Counter(kind_of(row, system) for row in rows)
            cells = " | ".join(str(counts[kind]) for kind in KINDS)
            lines.append(f"| {system}{',' * bool(after)}{after} | {cells} |")
    return lines


def _by_package(exact: list[Listed]) -> str:
    packages: dict[str, list[str]] = {}
    for of in exact:
        packages.setdefault(of.package, []).append(of.short)
    parts = [
        f"**{name} {importlib.metadata.version(name)}** ({len(names)}): {', '.join(names)}."
        for name, names in packages.items()
    ]
    return "\n\n".join(parts)


def _inexact(table: Table, name: str) -> list[tuple[str, str]]:
    """Where an optimizer is not exact, and what it gives there; alike results once."""
    places: dict[str, list[str]] = {}
    for after in ("", AGAIN):
        row = table[name + after]
        if row["plain"].kind != "exact":
            continue
        for system in (system for system in STAGES if system in row):
            kind = kind_of(row, system)
            if kind != "exact":
                said = "" if kind == "rounding" else f": {_reason(row[system])}"
                places.setdefault(f"{kind}{said}", []).append(f"{system}{after}")
    return [(", ".join(where), why) for why, where in places.items()]


def _rows(table: Table, known: list[Listed]) -> list[str]:
    """A row for each result, with all optimizers that have it."""
    names: dict[tuple[str, str], list[str]] = {}
    for of in known:
        for where, why in _inexact(table, of.name):
            # Optimizers of one package say the same with their own names.
            alike = re.sub(rf"\b{of.cls.__name__}\b", "X", why)
            names.setdefault((where, re.sub(r"has \[.*?\]", "has [...]", alike)), []).append(
                of.name
            )
    return [f"| {_short(of)} | {where} | {why} |" for (where, why), of in names.items()]


def _short(names: list[str]) -> str:
    """The names, each package once."""
    packages: dict[str, list[str]] = {}
    for package, _, name in (name.rpartition(".") for name in names):
        packages.setdefault(package, []).append(name)
    return "; ".join(f"{package}: {', '.join(own)}" for package, own in packages.items())


def _reason(verdict: Verdict) -> str:
    """The first sentence."""
    return re.split(r"[.;] ", plain_words(verdict.detail))[0]
