"""Sleeps put at random on the device's streams: what a missing wait would not survive."""

from __future__ import annotations

import random
import time

import torch

from zerocore import _C

ROLES = ("compute", "all_gather", "reduce_scatter")
# Clock cycles; at 1 to 2 GHz from shorter than a kernel to longer than a step of these tests.
CYCLES = (10_000, 100_000, 1_000_000, 5_000_000)


def sleep(device: torch.device, cycles: int) -> None:
    """Keeps the current stream busy; on the CPU, for a rehearsal, the host for a moment."""
    if device.type == "cpu":
        time.sleep(1e-5)
    else:
        torch.get_device_module(device)._sleep(cycles)


class RandomDelays:
    """A pause (see `tests.gpu.training`) that now and then delays one of an engine's streams."""

    def __init__(self, engine: _C.Engine, device: torch.device, seed: int) -> None:
        self.engine = engine
        self.device = device
        self.rng = random.Random(seed)
        # A few seeds delay one stream only, and so often that the others run far ahead of it.
        self.roles = (self.rng.choice(ROLES),) if seed % 3 == 0 else ROLES
        self.share = 0.8 if seed % 3 == 0 else 0.3
        self.num_delays = 0

    def __call__(self, place: str) -> None:
        if self.rng.random() >= self.share:
            return
        self.num_delays += 1
        role = self.rng.choice(self.roles)
        cycles = self.rng.choice(CYCLES)
        if role == "compute" or self.device.type == "cpu":
            sleep(self.device, cycles)
            return
        handle = self.engine.stream_handle(role)
        module = torch.get_device_module(self.device)
        with module.stream(module.ExternalStream(handle, self.device)):
            sleep(self.device, cycles)
