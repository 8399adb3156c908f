"""Code after an optimizer step finds the step's weights, however late the device is."""

from __future__ import annotations

import pytest

from tests.async_device.after_step import ACTIONS, Case, check

# Parked, parked and exported, freed and saved models: wrong if the code does not wait for the
# device's copies. A clone, averages, a snapshot, a load.
FEW = (0, 33, 46, 97, 2, 8, 9, 10)


def test_what_follows_a_step_finds_its_weights() -> None:
    assert check(FEW) == []


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_more_of_what_follows_a_step(first: int) -> None:
    assert check(range(first, first + 50)) == []


def test_the_seeds_have_everything() -> None:
    cases = [Case.of(seed) for seed in range(600)]
    met = {(case.action, case.offload) for case in cases}
    pairs = {(action, case.offload) for action in ACTIONS for case in cases}
    assert len(met) > 0.9 * len(pairs)
