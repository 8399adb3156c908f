"""Units in a file: they keep what was written to them, and errors name file and unit."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bindings import _C_testing

NUMELS = [1, 1000, 0, 300_000, 5000, 70_000, 2_000_000]


def make_units(folder: Path, num_buffers: int = 3) -> _C_testing.SwappedUnits:
    names = [f"blocks.{index}" for index in range(len(NUMELS))]
    nbytes = [4 * numel for numel in NUMELS]
    return _C_testing.SwappedUnits(str(folder), "states", names, nbytes, num_buffers)


def values(units: _C_testing.SwappedUnits, unit: int) -> Tensor:
    return units.acquire(unit, NUMELS[unit], torch.float32)


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 9])
def test_units_keep_their_values(num_buffers: int, tmp_path: Path) -> None:
    """Steps in an order, and uses out of turn; only some change what they use."""
    units = make_units(tmp_path, num_buffers)
    expected = [torch.zeros(numel) for numel in NUMELS]
    chance = random.Random(num_buffers)
    for step in range(4):
        order = [*range(len(NUMELS)), *reversed(range(len(NUMELS)))]
        units.expect(order)
        for unit in order if step % 2 == 0 else chance.sample(order, len(order)):
            found, changed = values(units, unit), chance.random() < 0.7
            assert torch.equal(found, expected[unit])
            if changed:
                found.add_(torch.arange(NUMELS[unit]) % 1000)
                expected[unit] = found.clone()
            units.release(unit, changed)
    units.finish()


def test_an_error_names_the_unit_and_stays(tmp_path: Path) -> None:
    """On the read of a unit that lies behind the file's new end."""
    units = make_units(tmp_path)
    os.truncate(f"/proc/self/fd/{units.descriptor}", 500_000)
    for unit in range(3):
        values(units, unit)
        units.release(unit, False)
    for _ in range(2):
        with pytest.raises(OSError, match=r"read states of unit 'blocks\.3' at byte") as caught:
            values(units, 3)
        assert caught.value.errno == errno.ENODATA and str(tmp_path) in str(caught.value)


def test_a_full_disk_names_the_unit(tmp_path: Path) -> None:
    units = make_units(tmp_path, num_buffers=2)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, units.descriptor)
    os.close(full)
    values(units, 0)  # reads zeros
    units.release(0, True)
    with pytest.raises(OSError, match=r"write states of unit 'blocks\.0' at byte 0") as caught:
        units.finish()
    assert caught.value.errno == errno.ENOSPC
