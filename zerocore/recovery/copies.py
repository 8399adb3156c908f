"""Copies this rank's training state, for retryable blocks and for snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.loaded_state import set_random_state
from zerocore.checkpoint.training_state import random_state
from zerocore.hooks.first_states import make_states
from zerocore.hooks.optimizer_states import options_of
from zerocore.tensor.rows import own_elements


class Large:
    """Weights and optimizer states, by the parameters' names."""

    def __init__(self, params: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        self.params, self._optimizers = params, optimizers

    def copy(self, device: torch.device | None = None) -> dict[str, Any]:
        """Copies this rank's elements, to ``device`` or where they are. Leaves parameters without
        states out of an optimizer's."""
        return {
            "weights": {name: _copied(param, device) for name, param in self.params.items()},
            "states": [
                {
                    name: {key: _copied(v, device) for key, v in optimizer.state[param].items()}
                    for name, param in self.params.items()
                    if optimizer.state.get(param)
                }
                for optimizer in self._optimizers
            ],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Writes the copies to the memory of weights and states; makes missing states first."""
        for name, param in self.params.items():
            own_elements(param).copy_(saved["weights"][name])
        for optimizer, states in zip(self._optimizers, saved["states"], strict=True):
            if any(not optimizer.state.get(self.params[name]) for name in states):
                make_states(optimizer)
            for name, param in self.params.items():
                if name in states:
                    _restore(optimizer.state[param], states[name])
                else:
                    optimizer.state.pop(param, None)


def _copied(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return own_elements(value).to(device or value.device, copy=True)


def _restore(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        present = state.get(key)
        if isinstance(value, Tensor) and isinstance(present, Tensor):
            own_elements(present).copy_(value)
        else:
            state[key] = deepcopy(value)


class Small:
    """Other state: options, buffers, random generators, and the program's objects."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], objects: Mapping[Any, Any]
    ) -> None:
        self._model, self._optimizers, self._objects = model, optimizers, objects

    def copy(self) -> dict[str, Any]:
        return {
            "options": [deepcopy(options_of(group)) for group in self._groups()],
            "buffers": {name: buffer.clone() for name, buffer in self._model.named_buffers()},
            "random": random_state(),
            "objects": {k: deepcopy(obj.state_dict()) for k, obj in self._objects.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        for group, options in zip(self._groups(), saved["options"], strict=True):
            group.update(options)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        set_random_state(saved["random"])
        for key, obj in self._objects.items():
            obj.load_state_dict(saved["objects"][key])

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)
