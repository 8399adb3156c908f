"""The emulated link: one process plays one rank of N over a modelled network."""

from zerocore.emulation.backend import Emulation, emulate, link

__all__ = ["Emulation", "emulate", "link"]
