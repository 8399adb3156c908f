"""Prints which stage trains which public optimizer exactly."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from tests.conftest import pytest_configure
from tests.distributed.optimizers.listed import all_optimizers
from tests.distributed.optimizers.page import as_markdown
from tests.distributed.optimizers.trained import AGAIN, DOUBLE, can_be_owned, program_of
from tests.distributed.programs.page import ROOT
from tests.distributed.programs.suite import Table, measure
from tests.distributed.programs.systems import FOR_OPTIMIZERS
from tests.distributed.programs.table import as_text, torch_version

OWNED, LOADED = "owned3", ("plain", "stage3")
PAGE = ROOT / "benchmarks" / "results" / "optimizers.md"


def measured(names: list[str], systems: list[str]) -> Table:
    """The table. States are loaded at stage 3 alone. A result that is wrong in float32 and exact in
    float64 is `rounding`. `owned` gets the optimizers that are not exact at stage 3."""
    table: Table = {name: {} for name in names}
    for system in (system for system in systems if system != OWNED):
        chosen = [n for n in names if system in LOADED or not n.endswith(AGAIN)]
        for name, row in _settled(measure(chosen, [system]), system).items():
            table[name] |= row
    if OWNED in systems and "stage3" in systems:
        inexact = [n for n in names if can_be_owned(n) and table[n]["stage3"].kind != "exact"]
        for name, row in _settled(measure(inexact, [OWNED]), OWNED).items():
            table[name] |= row
    return table


def _settled(table: Table, system: str) -> Table:
    """Tells rounding from wrong numbers."""
    wrong = [name for name, row in table.items() if row[system].kind == "WRONG"]
    double = measure([name + DOUBLE for name in wrong], [system]) if wrong else {}
    for name in wrong:
        if double[name + DOUBLE][system].kind == "exact":
            table[name][system] = replace(table[name][system], kind="rounding")
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.distributed.optimizers", description=__doc__)
    parser.add_argument("--only", action="append", help="an optimizer, or part of its name")
    parser.add_argument("--systems", nargs="+", default=list(FOR_OPTIMIZERS), help="some of them")
    parser.add_argument("--markdown", action="store_true", help="also write the result file")
    parser.add_argument("--traces", action="store_true", help="tracebacks of what is not exact")
    options = parser.parse_args()
    if options.markdown and (options.only or options.systems != list(FOR_OPTIMIZERS)):
        parser.error("--markdown takes all optimizers under all systems")
    pytest_configure()  # scheduled as tests are
    listed = [
        of
        for of in all_optimizers()
        if not options.only or any(part in of.name for part in options.only)
    ]
    names = [of.name + after for of in listed for after in ("", AGAIN)]
    start = time.monotonic()
    table = measured(names, options.systems)
    print(as_text(table, {name: program_of(name) for name in names}))
    print(f"{len(names)} programs in {time.monotonic() - start:.1f} s")
    if options.traces:
        for name, row in table.items():
            for system, verdict in row.items():
                if verdict.trace:
                    print(f"\n=== {name}, {system} ===\n{verdict.trace}")
    if options.markdown:
        PAGE.write_text(as_markdown(table, listed, torch_version()))


if __name__ == "__main__":
    main()
