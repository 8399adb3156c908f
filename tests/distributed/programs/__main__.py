"""Prints which system gets which program right."""

from __future__ import annotations

import argparse
import time

from tests.conftest import pytest_configure
from tests.distributed.programs.page import FULL, PAGE, as_page
from tests.distributed.programs.registry import all_programs
from tests.distributed.programs.suite import check_systems, measure
from tests.distributed.programs.systems import SYSTEMS
from tests.distributed.programs.table import as_markdown, as_text


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.distributed.programs", description=__doc__)
    parser.add_argument("--only", action="append", help="a program, or part of its name")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help="some of the systems")
    parser.add_argument(
        "--markdown", action="store_true", help="also write docs/programs.md and the full table"
    )
    parser.add_argument("--traces", action="store_true", help="tracebacks of what is not exact")
    options = parser.parse_args()
    if options.markdown and (options.only or options.systems != list(SYSTEMS)):
        parser.error("--markdown takes all programs under all systems")
    check_systems(options.systems)
    pytest_configure()  # scheduled as tests are
    programs = all_programs()
    names = [
        name for name in programs if not options.only or any(part in name for part in options.only)
    ]
    start = time.monotonic()
    table = measure(names, options.systems)
    print(as_text(table, programs))
    print(f"{len(names)} programs in {time.monotonic() - start:.1f} s")
    if options.traces:
        for name, row in table.items():
            for system, verdict in row.items():
                if verdict.trace:
                    print(f"\n=== {name}, {system} ===\n{verdict.trace}")
    if options.markdown:
        FULL.write_text(as_markdown(table, programs))
        PAGE.write_text(as_page(FULL.read_text()))


if __name__ == "__main__":
    main()
