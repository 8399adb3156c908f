"""A wait that is left out shows: the losses of real ranks change, or are NaN."""

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
    """For each kind, dropping the first or the last wait shows on some rank.

    Other waits protect bytes that this small model does not reuse in time.
    """
    options = {"stage": stage, "communication": zerocore.Communication(prefetch=1), **more}
    ranks = run_ranks(try_waits, 2, 3, options, True, launch="torchrun", timeout=200)
    kinds = {(wait.waiter, wait.source) for wait, _ in ranks[0]}
    # The host waits for a comparison, which finds no difference here.
    assert kinds - {("host", "compute")} == KINDS
    shown = {(wait.waiter, wait.source) for rank in ranks for wait, shows in rank if shows}
    assert shown == KINDS


# Waits for copies that show if left out. Two kinds never do, as other waits order the same work:
# compute's wait for gradients under way (the host waits for the copy before compute adds to it),
# and the wait of weights under way back for compute (their update has waited for its gradients).
# The next user of a block waits for the copy that moves its gradients to the host.
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
    """With states on the host the thread that updates them also waits for events."""
    options = {"stage": stage, "offload": offload}
    ranks = run_ranks(try_waits, 2, 3, options, True, launch="torchrun", timeout=200)
    shown = {(wait.waiter, wait.source) for rank in ranks for wait, shows in rank if shows}
    assert shown >= OF_COPIES[stage, offload], shown
