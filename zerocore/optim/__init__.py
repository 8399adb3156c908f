"""Optimizers of shards, and the clipping of gradients."""

from zerocore.optim.adamw import AdamW
from zerocore.optim.clipping import NonFiniteGradError

__all__ = ["AdamW", "NonFiniteGradError"]
