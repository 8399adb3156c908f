"""The sum of squares on the CPU against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import COUNTS, NARROW, check_sum_of_squares, filled, ops


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
def test_sum_of_squares(dtype: torch.dtype, count: int) -> None:
    check_sum_of_squares("cpu", dtype, count)


def test_shards_of_several_dtypes() -> None:
    shards = [filled(100 + i, dtype, "cpu") for i, dtype in enumerate((*NARROW, torch.float64))]
    shards[1][3] = float("nan")
    shards[2][5] = float("inf")
    out = torch.empty(2, dtype=torch.float64)
    ops.sum_of_squares(out, shards)
    assert out[1] == 2
    shards[1][3] = shards[2][5] = 0
    ops.sum_of_squares(out, shards)
    expected = sum(shard.double().square().sum() for shard in shards)
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=0)


def test_every_value_that_is_not_finite_counts() -> None:
    out = torch.empty(2, dtype=torch.float64)
    ops.sum_of_squares(out, [torch.full((10_001,), float("nan")), torch.ones(5)])
    assert out[1] == 10_001


def test_a_square_that_overflows_is_no_bad_value() -> None:
    out = torch.empty(2, dtype=torch.float64)
    ops.sum_of_squares(out, [torch.tensor([1e30])])
    assert out.tolist() == [float("inf"), 0]


def test_known_squares_give_the_same_bits() -> None:
    """Some shards' are known, of each dtype; a shard of one chunk has one pair of sums."""
    dtypes = (*NARROW, torch.float64)
    sizes = (8192, 100, 0, 20_000, 3)
    shards = [filled(n + i, dtype, "cpu") for i, n in enumerate(sizes) for dtype in dtypes]
    expected, found = torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    ops.sum_of_squares(expected, shards)
    known: list[Tensor | None] = []
    for index, shard in enumerate(shards):
        squares = torch.empty(2 if shard.numel() else 0, dtype=torch.float64)
        if shard.numel() > 0:
            ops.sum_of_squares(squares, [shard])
        known.append(squares if index % 3 and shard.numel() <= 8192 else None)
    ops.sum_of_squares(found, shards, known=known)
    assert torch.equal(found, expected)
    next(squares for squares in known if squares is not None)[0] += 1000.0
    ops.sum_of_squares(found, shards, known=known)
    assert found[0] > expected[0]
