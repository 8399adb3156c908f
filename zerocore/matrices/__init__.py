"""Optimizers of whole matrices: which rank updates which, and what travels for it."""

from zerocore.matrices.muon import Muon
from zerocore.matrices.owned import owned

__all__ = ["Muon", "owned"]
