"""Bytes on one rank, by what holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank.

    Attributes:
        parameters: parameters that stay between steps, gaps and padding included.
        gradients: gradient memory that stays between steps.
        optimizer: states of the parameters' size (step counters not counted).
        pool: peak of the bucket pool: gathered parameters and gradients on their way.
        main_weights: the optimizer's copies of parameters that compute in another dtype.
    """

    parameters: int
    gradients: int
    optimizer: int
    pool: int
    main_weights: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds, bytes."""
        kept = self.parameters + self.main_weights + self.gradients + self.optimizer
        return kept + self.pool
