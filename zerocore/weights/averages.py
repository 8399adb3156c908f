"""Exponential moving averages of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerocore.hooks.optimizer_states import as_state, params_of
from zerocore.tensor.rows import own_elements, shard_of


class EMA(Optimizer):
    """Averages of a model's parameters, each rank's elements: ``decay * old + (1 - decay) * new``.

    Call :meth:`update` behind the optimizer's step, on all ranks; it communicates nothing and is
    one foreach call. Averages have the dtype of main weights, or of parameters without them.
    Checkpoints take an EMA in the list of optimizers, and load it on any number of ranks.

    Args:
        params: of a sharded model, or groups of them with a ``decay`` of their own.
        decay: between 0 and 1.

    Raises:
        ValueError: another decay.
    """

    averages_params = True  # checkpoints ask: another optimizer updates the same parameters

    def __init__(self, params: Iterable[Any], decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        super().__init__(params, {"decay": decay})
        self.make_states()

    def make_states(self) -> None:
        """Begins the averages of parameters that have none yet, with their values."""
        for param in params_of(self):
            if not self.state.get(param):
                self.state[param] = {"average": as_state(own_elements(param).clone(), param)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: an EMA updates no parameters."""
        raise TypeError("an EMA has no step; call update() behind the optimizer's")

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters' values into the averages."""
        for group in self.param_groups:
            if group["params"]:
                values = [own_elements(param, reads_only=True) for param in group["params"]]
                averages = [self._average(param) for param in group["params"]]
                torch._foreach_lerp_(averages, values, 1 - group["decay"])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averages until the end of the block; all ranks enter.

        Parameters wait in the place of the averages, so no memory is taken but for one tensor.
        Inside, take no step and call no :meth:`update`.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        params = params_of(self)
        shards = [shard for param in params if (shard := shard_of(param)) is not None]
        for state in dict.fromkeys(shard.state_ref() for shard in shards):
            if state is not None:
                state.finish_reads()
        for param in params:
            value, average = own_elements(param), self._average(param)
            held = value.clone()
            value.copy_(average)
            average.copy_(held)

    def _average(self, param: Any) -> Tensor:
        if not self.state.get(param):
            self.make_states()
        average: Any = self.state[param]["average"]
        return own_elements(average)
