"""Orthogonalises matrices by Newton-Schulz iterations, those of one shape in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Shorter sides of what a CPU takes in one batch. For larger matrices it is 2 to 4 times slower than
# one after the other, for smaller ones its sums round differently from those of one matrix.
_BATCHED_ON_CPU = range(24, 129)
ADJUSTMENTS = ("original", "match_rms_adamw")


def orthogonalise(batch: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Orthogonalises each matrix as ``torch.optim.Muon`` does, by the same operations.

    Args:
        batch: matrices, ``(count, rows, columns)``, of any floating dtype.
        coefficients: of the polynomial of degree 5, three.
        steps: how often it is applied.
        eps: least norm that a matrix is divided by.

    Returns:
        bfloat16, of the same shape.
    """
    if batch.device.type == "cpu" and min(batch.shape[1:]) not in _BATCHED_ON_CPU:
        return torch.stack([_iterate(matrix, coefficients, steps, eps) for matrix in batch])
    return _iterate(batch, coefficients, steps, eps)


def _iterate(given: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    add_product = torch.addmm if given.dim() == 2 else torch.baddbmm
    is_tall = given.size(-2) > given.size(-1)
    x = given.to(torch.bfloat16, copy=True)
    x = x.mT if is_tall else x
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def adjusted_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """By what the learning rate is multiplied for a matrix, as in ``torch.optim.Muon``."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
