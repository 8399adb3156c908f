"""Optimizers for shards, and gradient clipping."""

from zerocore.optim.adamw import AdamW
from zerocore.optim.clipping import NonFiniteGradError

__all__ = ["AdamW", "NonFiniteGradError"]
