"""A wait that is left out shows: the losses of real ranks are others, or NaN."""

from __future__ import annotations

from typing import Any

import pytest

import zerocore
from tests.async_device.faults import GRADIENTS, STATES, try_waits
from tests.by_night import by_night
from tests.distributed.harness import run_ranks

KINDS = {
    ("all_gather", "compute"),
    ("compute", "all_gather"),
    ("reduce_scatter", "compute"),
    ("compute", "reduce_scatter"),
}


@pytest.mark.parametrize(
    ("stage", "more"),
    [*by_night((1, {}), (3, {"other_mesh": ("1",)})), (3, {})],
)
def test_a_missing_wait_shows(stage: int, more: dict[str, Any]) -> None:
    """Of each kind at least one of the first and the last, on some rank.

    The others are for bytes that this small model takes in no turn in which it would matter.
    """
    options = {"stage": stage, "communication": zerocore.Communication(prefetch=1), **more}
    ranks = run_ranks(try_waits, 2, 3, options, True, launch="torchrun", timeout=200)
    kinds = {(wait.waiter, wait.source) for wait, _ in ranks[0]}
    # That of the host is for a comparison, which finds nothing here.
    assert kinds - {("host", "compute")} == KINDS
    shown = {(wait.waiter, wait.source) for rank in ranks for wait, shows in rank if shows}
    assert shown == KINDS


# Waits for copies that show when they are left out. Two kinds never do, as others order the same:
# compute behind gradients on their way (before it adds to them, the host has waited for the copy),
# and weights on their way back behind compute (their update has waited for its gradients).
# Gradients that are kept on the host leave a block, whose next user waits for the copy.
OF_COPIES = {
    (0, STATES): {("compute", "host_to_device")},
    (3, STATES): {
        ("all_gather", "host_to_device"),
        ("device_to_host", "compute"),
        ("host", "device_to_host"),
    },
    (3, GRADIENTS): {
        ("all_gather", "host_to_device"),
        ("device_to_host", "compute"),
        ("all_gather", "device_to_host"),
        ("host", "device_to_host"),
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "offload"), OF_COPIES)
def test_a_missing_wait_of_offload_shows(stage: int, offload: zerocore.Offload) -> None:
    """With states on the host, where the thread that updates them waits for events itself."""
    options = {"stage": stage, "offload": offload}
    ranks = run_ranks(try_waits, 2, 3, options, True, launch="torchrun", timeout=200)
    shown = {(wait.waiter, wait.source) for rank in ranks for wait, shows in rank if shows}
    assert shown >= OF_COPIES[stage, offload], shown
