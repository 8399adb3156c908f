"""Exponential moving averages of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerocore.hooks.optimizer_states import AVERAGE, as_state, params_of
from zerocore.tensor.rows import own_elements, shard_of


class EMA(Optimizer):
    """Averages of a model's parameters, by shards: ``decay * old + (1 - decay) * new``.

    Call :meth:`update` after the optimizer's step, on all ranks; it is one foreach call, without
    communication. Averages have the dtype of the main weights, or of parameters without these.
    Checkpoints take an EMA in the list of optimizers, and load it on any number of ranks.

    Args:
        params: parameters of a sharded model, or groups of them with a ``decay`` of their own.
        decay: between 0 and 1.

    Raises:
        ValueError: ``decay`` is out of range.
    """

    averages_params = True  # tells checkpoints that another optimizer updates these parameters

    def __init__(self, params: Iterable[Any], decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        super().__init__(params, {"decay": decay})
        self.make_states()

    def make_states(self) -> None:
        """Makes missing averages, with the parameters' values."""
        for param in params_of(self):
            if not self.state.get(param):
                self.state[param] = {AVERAGE: as_state(own_elements(param).clone(), param)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Rejects the call: an EMA updates no parameters."""
        raise TypeError("an EMA has no step; call update() after the optimizer's step")

    @torch.no_grad()
    def update(self) -> None:
        """Adds the parameters' current values to the averages."""
        for group in self.param_groups:
            if group["params"]:
                values = [own_elements(param, reads_only=True) for param in group["params"]]
                averages = [self._average(param) for param in group["params"]]
                torch._foreach_lerp_(averages, values, 1 - group["decay"])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Makes the model compute with the averages within the block; all ranks must enter.

        It swaps the values of parameters and averages, which takes memory for one tensor only.
        Inside, call neither an optimizer's step nor :meth:`update`.
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
            saved = value.clone()
            value.copy_(average)
            average.copy_(saved)

    def _average(self, param: Any) -> Tensor:
        if not self.state.get(param):
            self.make_states()
        average: Any = self.state[param][AVERAGE]
        return own_elements(average)
