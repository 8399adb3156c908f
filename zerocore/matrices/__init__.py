"""Optimizers that update whole matrices, each on the rank that owns it."""

from zerocore.matrices.muon import Muon
from zerocore.matrices.owned import owned

__all__ = ["Muon", "owned"]
