"""How the tests are scheduled, and what tests of the benchmarks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def pytest_configure() -> None:
    """Processes that wake up do not preempt others: collectives take a fraction of the time.

    With more ranks than cores, a rank is else preempted in the moment it sends, holding the lock
    that gloo's own thread then spins on for a time slice. All processes of a test inherit this.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(PermissionError):  # some sandboxes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The private modules of the benchmarks by their names, as their scripts see them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
