"""Orthogonalises matrices by Newton-Schulz iterations, all of one shape in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ADJUSTMENTS = ("original", "match_rms_adamw")


def orthogonalise(batch: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """What ``torch.optim.Muon`` makes of each matrix, by the same operations.

    Args:
        batch: matrices, ``(count, rows, columns)``, of any floating dtype.
        coefficients: of the polynomial of degree 5, three.
        steps: how often it is applied.
        eps: least norm that a matrix is divided by.

    Returns:
        bfloat16, of the same shape.
    """
    a, b, c = coefficients
    is_tall = batch.size(1) > batch.size(2)
    x = batch.to(torch.bfloat16, copy=True)
    x = x.mT if is_tall else x
    norms: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def adjusted_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """By what the learning rate is multiplied for a matrix, as in ``torch.optim.Muon``."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
