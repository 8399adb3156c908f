"""A checkpoint's contents for a model and its optimizer, by names; checked before loading."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerocore.checkpoint.safe_files import shown
from zerocore.hooks.optimizer_states import filled_later, make_states, params_of
from zerocore.optim.ema import EMA
from zerocore.tensor.place import Placed
from zerocore.tensor.rows import as_range, as_rows

State = dict[str, Any]
Optimizers = Sequence[Optimizer]


def optimizers_of(optimizer: Optimizer | Sequence[Optimizer] | None) -> Optimizers:
    """One, several or none as several; TypeError for others, ValueError if two share a
    parameter."""
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = [each for each in given if each is not None]
    seen: set[int] = set()
    for each in optimizers:
        if not hasattr(each, "param_groups") or not hasattr(each, "state_dict"):
            raise TypeError(
                f"optimizer: expected an optimizer or a list of optimizers, got {type(each)}"
            )
        if isinstance(each, EMA):  # of parameters that another one updates
            continue
        own = {id(param) for param in params_of(each)}
        if shared := [param for param in params_of(each) if id(param) in seen]:
            raise ValueError(
                f"optimizer: two of the list hold '{getattr(shared[0], 'fqn', shared[0])}'; give "
                "each parameter to one of them"
            )
        seen |= own
    return optimizers


def check_stateful(objects: Mapping[str, Any]) -> None:
    """Raises TypeError for an object that cannot be saved and loaded."""
    for name, value in objects.items():
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise TypeError(
                f"{name}: expected an object with state_dict and load_state_dict, got {type(value)}"
            )


def training_state(model: nn.Module, optimizers: Optimizers) -> State:
    """``{"model": ..., "optim": ...}`` on the memory of all, as torch's functions name it.

    Several optimizers are as one with the groups of all.
    """
    values, owners = model.state_dict(), model.state_dict(keep_vars=True)
    state: State = {"model": {key: as_range(v, owners[key]) for key, v in values.items()}}
    if optimizers:
        state["optim"] = _by_names(model, optimizers)
    return state


def load_model(model: nn.Module, state: State) -> None:
    """Gives the model what was loaded into the tensors of :func:`training_state`."""
    owners = model.state_dict(keep_vars=True)
    model.load_state_dict({key: as_rows(value, owners[key]) for key, value in state.items()})


def _by_names(model: nn.Module, optimizers: Optimizers) -> State:
    merged: State = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        params, packed = _names(model, optimizer), optimizer.state_dict()
        names = list(params)
        for index, state in packed["state"].items():
            param = params[names[index]]
            known = merged["state"].setdefault(names[index], {})
            known.update({k: as_range(v, param) for k, v in state.items()})
        merged["param_groups"].extend(
            {**group, "params": [names[index] for index in group["params"]]}
            for group in packed["param_groups"]
        )
    return merged


def _names(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's parameters by name, in their order."""
    known = {id(param): name for name, param in model.named_parameters()}
    params = params_of(optimizer)
    for param in params:
        if id(param) not in known:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the "
                "model; give Checkpoints the model that it was built from"
            )
    return {known[id(param)]: param for param in params}


def check_tensors(state: State, prefix: str, metadata: Metadata, trouble: str) -> None:
    """Raises ValueError if a checkpoint's tensors of this prefix do not fit; names the key."""
    saved = {key for key in metadata.state_dict_metadata if key.startswith(prefix)}
    own = {f"{prefix}{key}": value for key, value in flatten_state_dict(state)[0].items()}
    missing, unexpected = sorted(set(own) - saved), sorted(saved - set(own))
    if missing or unexpected:
        raise ValueError(f"{trouble}: missing {shown(missing)}, unexpected {shown(unexpected)}")
    for key, value in own.items():
        _check_tensor(key, value, metadata.state_dict_metadata[key], trouble)


def _check_tensor(key: str, value: Any, facts: Any, trouble: str) -> None:
    if isinstance(facts, TensorStorageMetadata) != isinstance(value, Tensor):
        raise ValueError(f"{trouble}: '{key}' is no tensor, or should not be one")
    if not isinstance(facts, TensorStorageMetadata):
        return
    expected = value.place.whole_shape if isinstance(value, Placed) else value.shape
    if facts.size != expected:
        raise ValueError(
            f"{trouble}: '{key}' has shape {shown(tuple(facts.size))}, expected {tuple(expected)}"
        )
    kinds = [dtype.is_floating_point for dtype in (facts.properties.dtype, value.dtype)]
    if kinds[0] != kinds[1] or facts.properties.dtype.is_complex != value.dtype.is_complex:
        raise ValueError(f"{trouble}: '{key}' is {facts.properties.dtype}, expected {value.dtype}")


def fit_optimizers(
    model: nn.Module,
    optimizers: Optimizers,
    groups: list[State],
    metadata: Metadata,
    folder: object,
) -> State:
    """The optimizers' states that the checkpoint has, on their own memory, and its ``groups``, of
    whose options a missing one keeps its value. ValueError that names folder and key for others.

    States are made where there are none yet, of memory that holds anything, and stay if this
    raises. A parameter may lack its state as a whole.
    """
    if not groups:
        raise ValueError(f"{folder} holds no optimizer's state")
    own_groups = _by_names(model, optimizers)["param_groups"]
    if [group["params"] for group in groups] != [group["params"] for group in own_groups]:
        raise ValueError(
            f"{folder} has parameter groups of {_outline(groups)}, the optimizer of "
            f"{_outline(own_groups)}; build it as it was"
        )
    saved = {key for key in metadata.state_dict_metadata if key.startswith("optim.state.")}
    stated = {key.removeprefix("optim.state.").rpartition(".")[0] for key in saved}
    new = params_without_state(model, optimizers)
    with filled_later():
        for optimizer in optimizers:
            make_states(optimizer)
    drop_states(model, optimizers, new - stated)
    state = {k: v for k, v in _by_names(model, optimizers)["state"].items() if k in stated}
    trouble = f"{folder} was saved with another kind of optimizer"
    check_tensors(state, "optim.state.", metadata, trouble)
    return {"state": state, "param_groups": groups}


def params_without_state(model: nn.Module, optimizers: Optimizers) -> set[str]:
    return {
        name
        for optimizer in optimizers
        for name, param in _names(model, optimizer).items()
        if not optimizer.state.get(param)
    }


def drop_states(model: nn.Module, optimizers: Optimizers, names: set[str]) -> None:
    for optimizer in optimizers:
        for name, param in _names(model, optimizer).items():
            if name in names:
                optimizer.state.pop(param, None)


def _outline(groups: list[State]) -> str:
    return ", ".join(
        f"{len(group['params'])} ({shown(group['params'][:1])}...)" for group in groups
    )


def load_optimizers(model: nn.Module, optimizers: Optimizers, state: State) -> None:
    """Gives optimizers states and options of ``fit_optimizers``, whose tensors are loaded."""
    saved = iter(state["param_groups"])
    for optimizer in optimizers:
        params = _names(model, optimizer)
        numbers = {name: number for number, name in enumerate(params)}
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in islice(saved, len(optimizer.param_groups))
        ]
        states = {
            numbers[name]: {
                k: as_rows(v, params[name])
                for k, v in values.items()
                if (k == "average") == isinstance(optimizer, EMA)
            }
            for name, values in state["state"].items()
            if name in numbers
        }
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def random_state() -> State:
    """This process's streams: torch's on the CPU and the current device, Python's and numpy's."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_random_state(state: State) -> None:
    """Raises Exception if streams cannot be continued from there; none is changed."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.RandomState().set_state(tuple(state["numpy"]))


def set_random_state(state: State) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
