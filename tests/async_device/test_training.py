"""Real ranks on the device: what they learn is what ranks on the CPU learn."""

from __future__ import annotations

import pytest

import zerocore
from tests.async_device.training import start, train_offloaded, train_sharded
from tests.distributed.harness import run_ranks

STAGES = range(4)
PREFETCH = (0, 1, 2)


def train_all(on_device: bool, seeds: int) -> list[list[float]]:
    """Losses of this rank by stage and prefetch; on the device also by seed of its delays."""
    device, extension = start(on_device)
    losses = []
    for seed in range(seeds):
        if on_device:
            extension.set_delays(seed, 0.3 if seed else 0.0, 400)
        for stage in STAGES:
            losses += [train_sharded(device, stage, prefetch) for prefetch in PREFETCH[seed:]]
    return losses


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_are_those_of_gloo(num_ranks: int) -> None:
    """Bit for bit: both ways sum in the order of the ranks."""
    seeds = 3 if num_ranks == 2 else 1
    expected = run_ranks(train_all, num_ranks, False, seeds, launch="torchrun", timeout=150)
    found = run_ranks(train_all, num_ranks, True, seeds, launch="torchrun", timeout=150)
    assert found == expected


def train_all_offloaded(on_device: bool) -> list[list[float]]:
    """As train_all, with states on the host; and parameters, at stage 3."""
    device, extension = start(on_device)
    losses = []
    for seed in range(2):
        if on_device:
            extension.set_delays(seed, 0.3 if seed else 0.0, 400)
        for stage in STAGES:
            losses.append(train_offloaded(device, stage, zerocore.Offload(states="cpu")))
        everything = zerocore.Offload(states="cpu", parameters="cpu")
        losses.append(train_offloaded(device, 3, everything))
    return losses


def test_losses_with_states_on_the_host_are_those_of_gloo() -> None:
    expected = run_ranks(train_all_offloaded, 2, False, launch="torchrun", timeout=150)
    found = run_ranks(train_all_offloaded, 2, True, launch="torchrun", timeout=150)
    assert found == expected
