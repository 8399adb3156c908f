"""Copies on this rank of what training changes, and the way back: for blocks that are undone, and
for snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.training_state import random_state, set_random_state
from zerocore.hooks.optimizer_states import make_states, options_of, params_of
from zerocore.tensor.rows import own_elements

_Named = Sequence[tuple[str, Any]]  # parameters, or other objects, of this rank


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy that holds this rank's elements of a tensor; ``device``: where, if not there."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return own_elements(value).to(device or value.device, copy=True)


def copies_of_states(
    params: _Named, optimizers: Sequence[Optimizer], device: torch.device | None = None
) -> list[dict[str, dict[str, Any]]]:
    """The states of each optimizer, by parameter and key; parameters without any are left out."""
    return [
        {
            name: {key: copied(value, device) for key, value in optimizer.state[param].items()}
            for name, param in params
            if optimizer.state.get(param)
        }
        for optimizer in optimizers
    ]


def restore_states(
    params: _Named, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Gives optimizers the states of :func:`copies_of_states`, in the memory that they have."""
    for optimizer, states in zip(optimizers, saved, strict=True):
        if any(name in states and not optimizer.state.get(param) for name, param in params):
            make_states(optimizer)
        for name, param in params:
            if name not in states:
                optimizer.state.pop(param, None)
            for key, value in states.get(name, {}).items():
                own = optimizer.state[param].get(key)
                if isinstance(value, Tensor) and isinstance(own, Tensor):
                    own_elements(own).copy_(value)
                else:
                    optimizer.state[param][key] = value


class Small:
    """The rest beside the shards: options, buffers, random streams, and the program's objects."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], objects: Mapping[Any, Any]
    ) -> None:
        self._model, self._optimizers, self._objects = model, optimizers, objects

    def copy(self) -> dict[str, Any]:
        return {
            "options": [deepcopy(options_of(group)) for group in self._groups()],
            "buffers": {name: buffer.clone() for name, buffer in self._model.named_buffers()},
            "random": random_state(),
            "objects": {k: deepcopy(each.state_dict()) for k, each in self._objects.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        for group, options in zip(self._groups(), saved["options"], strict=True):
            group.update(options)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        set_random_state(saved["random"])
        for key, each in self._objects.items():
            each.load_state_dict(saved["objects"][key])

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for each in self._optimizers for group in each.param_groups)


def params_by_number(optimizers: Sequence[Optimizer]) -> list[tuple[str, Any]]:
    """Parameters of the optimizers, each once."""
    params = dict.fromkeys(param for each in optimizers for param in params_of(each))
    return [(str(number), param) for number, param in enumerate(params)]
