"""A wait that is left out shows: the losses of real ranks are others, or NaN."""

from __future__ import annotations

import pytest

from tests.async_device.faults import try_waits
from tests.distributed.harness import run_ranks

KINDS = {
    ("all_gather", "compute"),
    ("compute", "all_gather"),
    ("reduce_scatter", "compute"),
    ("compute", "reduce_scatter"),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_wait_shows(stage: int) -> None:
    """Of each kind at least one of the first and the last, on some rank.

    The others are for bytes that this small model takes in no turn in which it would matter.
    """
    ranks = run_ranks(try_waits, 2, 3, stage, 1, True, launch="torchrun", timeout=200)
    assert {(wait.waiter, wait.source) for wait, _ in ranks[0]} == KINDS
    shown = {(wait.waiter, wait.source) for rank in ranks for wait, shows in rank if shows}
    assert shown == KINDS
