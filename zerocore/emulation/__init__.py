"""Emulates a network: one process plays one rank of N."""

from zerocore.emulation.backend import Emulation, emulate, link

__all__ = ["Emulation", "emulate", "link"]
