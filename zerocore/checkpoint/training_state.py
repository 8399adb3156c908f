"""Builds the state of a model and its optimizers that a checkpoint holds, by names."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.plain_values import as_leaf, tensors_in, text_key
from zerocore.hooks.optimizer_states import (
    params_of,
    unwrapped,
)
from zerocore.tensor.rows import as_range, shard_of

State = dict[str, Any]
OTHERS = "zerocore_other_states"  # the first group's option with states of no parameter
Optimizers = Sequence[Optimizer]


def optimizers_of(optimizer: Optimizer | Sequence[Optimizer] | None) -> Optimizers:
    """Returns one, several or no optimizers as a list, without their wrappers. Raises TypeError for
    other objects, ValueError if two share a parameter."""
    entries = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    optimizers: list[Optimizer] = []
    seen: set[int] = set()
    for entry in entries:
        if entry is None:
            continue
        if not hasattr(entry, "param_groups") or not hasattr(entry, "state_dict"):
            raise TypeError(
                f"optimizer: expected an optimizer or a list of optimizers, got {type(entry)}"
            )
        optimizers.append(unwrapped(entry))
        if averages(entry):  # it holds parameters that another optimizer updates
            continue
        params = params_of(entry)
        if shared := [param for param in params if id(param) in seen]:
            shard = shard_of(shared[0])
            name = f"a parameter of shape {tuple(shared[0].shape)}"
            if shard is not None:
                name = f"'{shard.fqn}'"
            raise ValueError(
                f"optimizer: two of the list hold {name}; give each parameter to one of them"
            )
        seen |= {id(param) for param in params}
    return optimizers


def averages(optimizer: Optimizer) -> bool:
    """Whether it averages parameters, as :class:`zerocore.weights.EMA` does."""
    return getattr(optimizer, "averages_params", False)


def check_stateful(objects: Mapping[str, Any]) -> None:
    """Rejects an object that cannot be saved and loaded (TypeError)."""
    for name, value in objects.items():
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise TypeError(
                f"{name}: expected an object with state_dict and load_state_dict, got {type(value)}"
            )


def training_state(model: nn.Module, optimizers: Optimizers) -> State:
    """Returns ``{"model": ..., "optim": ...}`` on the memory of both, with torch's names.

    Several optimizers appear as one, which has the groups of all.
    """
    values, owners = model.state_dict(), model.state_dict(keep_vars=True)
    state: State = {"model": {key: as_range(v, owners[key]) for key, v in values.items()}}
    if optimizers:
        state["optim"] = states_by_names(model, optimizers)
    return state


def states_by_names(model: nn.Module, optimizers: Optimizers) -> State:
    """Returns all states and groups, as one optimizer's, by names of parameters."""
    merged: State = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        params, packed = names_of(model, optimizer), optimizer.state_dict()
        if packed.keys() != {"state", "param_groups"}:
            raise TypeError(
                f"optimizer: the state_dict of {type(optimizer).__name__} has {list(packed)}, "
                "expected state and param_groups: Checkpoints cannot save the rest"
            )
        names, unowned = list(params), {}
        for index, state in packed["state"].items():
            if not isinstance(index, int) or not isinstance(state, Mapping):
                unowned[index] = state  # not a parameter's
                continue
            param = params[names[index]]
            flat = _taken_apart(state, f"the optimizer's state of '{names[index]}'")
            known = merged["state"].setdefault(names[index], {})
            known.update({k: as_range(v, param) for k, v in flat.items()})
        groups = [{**group} for group in packed["param_groups"]]
        if unowned:
            groups[0][OTHERS] = unowned
        merged["param_groups"].extend(_named_group(group, names) for group in groups)
    return merged


def _taken_apart(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Moves the tensors of containers in a parameter's state to keys of their own. An outline
    replaces each container, and a load makes the container from it again."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{where}[{text_key(key, where)!r}]"
        if isinstance(value, Tensor):
            flat[key] = value
        elif next(tensors_in(value), None) is None:
            flat[key] = as_leaf(value, name)
        else:
            from zerocore.checkpoint.containers import CONTAINER, outline  # late: few states

            flat[key] = (CONTAINER, outline(value, str(key), name, flat))
    return flat


def _named_group(group: State, names: list[str]) -> State:
    where = "the optimizer's option"
    options = {text_key(k, where): as_leaf(v, f"{where} '{k}'") for k, v in group.items()}
    return {**options, "params": [names[index] for index in group["params"]]}


def names_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's parameters by name, in order."""
    known = {id(param): name for name, param in model.named_parameters()}
    params = params_of(optimizer)
    for param in params:
        if id(param) not in known:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the "
                "model; give Checkpoints the model that it was built from"
            )
    return {known[id(param)]: param for param in params}


def random_state() -> State:
    """Returns this process's random streams: torch's (CPU, current device), Python's, numpy's."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
