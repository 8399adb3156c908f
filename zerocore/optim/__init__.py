"""The fused optimizer of shards, and the clipping of their gradients."""

from zerocore.optim.adamw import AdamW

__all__ = ["AdamW"]
