"""Optimizers of shards, those of whole matrices too, and the clipping of gradients."""

from zerocore.optim.adamw import AdamW
from zerocore.optim.clipping import NonFiniteGradError
from zerocore.optim.ema import EMA
from zerocore.optim.muon import Muon
from zerocore.optim.owned import owned

__all__ = ["EMA", "AdamW", "Muon", "NonFiniteGradError", "owned"]
