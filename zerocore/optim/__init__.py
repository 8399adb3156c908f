"""Optimizers of shards, and the clipping of gradients."""

from zerocore.optim.adamw import AdamW
from zerocore.optim.clipping import NonFiniteGradError
from zerocore.optim.ema import EMA

__all__ = ["EMA", "AdamW", "NonFiniteGradError"]
