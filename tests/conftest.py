"""How the tests are scheduled."""

from __future__ import annotations

import os
from contextlib import suppress


def pytest_configure() -> None:
    """Processes that wake up do not preempt others: collectives take a fraction of the time.

    With more ranks than cores, a rank is else preempted in the moment it sends, holding the lock
    that gloo's own thread then spins on for a time slice. All processes of a test inherit this.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(PermissionError):  # some sandboxes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
