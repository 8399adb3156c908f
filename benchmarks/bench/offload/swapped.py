"""Steps of AdamW on units whose weights and moments are in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.lib.systems import import_zerocore

import_zerocore()  # and with it the tests, which have the units' binding
from tests.bindings._C_testing import SwappedUnits  # noqa: E402

ops: Any = torch.ops.zerocore
STATES = 3  # weight, exp_avg, exp_avg_sq, one after the other
FP32_NBYTES = 4
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


class SwappedAdamW:
    """`num_units` units of `numel` fp32 parameters; the gradient is the same for each."""

    def __init__(self, folder: Path, num_units: int, numel: int) -> None:
        names = [f"blocks.{index}" for index in range(num_units)]
        sizes = [STATES * FP32_NBYTES * numel] * num_units
        self.units = SwappedUnits(str(folder), "states", names, sizes)
        self.num_units, self.numel = num_units, numel
        self._grad = torch.randn(numel)
        self._steps = [torch.zeros(()) for _ in range(num_units)]

    @property
    def nbytes(self) -> int:
        """Read and written in a step."""
        return 2 * self.units.file_nbytes

    def step(self) -> None:
        """Updates all units and waits until the file has them."""
        self.units.expect(range(self.num_units))
        for unit in range(self.num_units):
            states = self.units.acquire(unit, STATES * self.numel, torch.float32)
            self._update(unit, states.split(self.numel))
            self.units.release(unit, True)
        self.units.finish()

    def _update(self, unit: int, states: tuple[Tensor, ...]) -> None:
        weight, exp_avg, exp_avg_sq = states
        steps = [self._steps[unit]]
        ops.adamw([weight], [self._grad], [exp_avg], [exp_avg_sq], steps, [], **OPTIONS)

    def time_steps(self, rounds: int) -> list[float]:
        """Seconds of each step, after one that is not counted."""
        self.step()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        return seconds
