"""Newton-Schulz: the bits of torch's for each matrix of a batch, singular values near one."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from zerocore.matrices.muon_rounds import adjusted_ratio, orthogonalise

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(16, 16), (2, 1), (7, 5), (64, 24), (33, 65), (150, 140)])
def test_bits_are_those_of_one_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for scale in (1e-3, 1.0, 1e4):
        batch = torch.randn(4, *shape) * scale
        before = batch.clone()
        found = orthogonalise(batch, COEFFICIENTS, 5, 1e-7)
        each = [_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7) for x in batch]
        assert torch.equal(found, torch.stack(each)) and found.dtype == torch.bfloat16
        assert torch.equal(batch, before)
        values = torch.linalg.svdvals(found.float())
        if scale == 1.0 and min(shape) > 1:
            assert values.min() > 0.3 and values.max() < 1.3


def test_learning_rates_are_torchs() -> None:
    for adjust in (None, "original", "match_rms_adamw"):
        for rows, columns in ((4, 16), (16, 4), (8, 8)):
            expected = _muon._adjust_lr(1.0, adjust, torch.Size((rows, columns)))
            assert adjusted_ratio(adjust, rows, columns) == expected
