"""How the tests are scheduled."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

import pytest


def pytest_configure() -> None:
    """Processes that wake up do not preempt others: collectives take a fraction of the time.

    With more ranks than cores, a rank is else preempted in the moment it sends, holding the lock
    that gloo's own thread then spins on for a time slice. All processes of a test inherit this.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(PermissionError):  # some sandboxes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    """For a second run of the tests, on another build or version of torch."""
    parser.addoption(
        "--ends-only",
        action="store_true",
        help="run only the first and the last set of parameters of each test",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts files with a slow test first: the last ones then end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("--ends-only"):
        kept = ends(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Leaves what is imported by now out of the collections of garbage that tests cause."""
    gc.collect()
    gc.freeze()


def ends(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test function the first and the last of `items`."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {end for same in by_function.values() for end in (same[0], same[-1])}
