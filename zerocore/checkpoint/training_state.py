"""A checkpoint's contents for a model and its optimizer, by names; checked before loading."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerocore.checkpoint.safe_files import shown
from zerocore.common.state_memory import filled_later
from zerocore.hooks.optimizer_states import make_states

State = dict[str, Any]


def training_state(model: nn.Module, optimizer: Optimizer | None) -> State:
    """``{"model": ..., "optim": ...}`` on the memory of both, as torch's functions name it."""
    state: State = {"model": dict(model.state_dict())}
    if optimizer is not None:
        state["optim"] = _by_names(model, optimizer)
    return state


def _by_names(model: nn.Module, optimizer: Optimizer) -> State:
    names = _names(model, optimizer)
    packed = optimizer.state_dict()
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    state = {names[index]: value for index, value in packed["state"].items()}
    return {"state": state, "param_groups": groups}


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    known = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in known:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the "
                "model; give Checkpoints the model that it was built from"
            )
    return [known[id(param)] for param in params]


def flat(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """``("optim.state.weight.step", value)`` and so on, as torch flattens dicts."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_model(state: State, metadata: Metadata, folder: object) -> None:
    """Raises ValueError if the weights of a checkpoint do not fit; names folder and key."""
    saved = {key for key in metadata.state_dict_metadata if key.startswith("model.")}
    own = dict(flat(state["model"], "model."))
    missing, unexpected = sorted(set(own) - saved), sorted(saved - set(own))
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not fit the model: missing {shown(missing)}, unexpected "
            f"{shown(unexpected)}"
        )
    for key, value in own.items():
        _check_tensor(key, value, metadata, folder)


def _check_tensor(key: str, value: Any, metadata: Metadata, folder: object) -> None:
    facts = metadata.state_dict_metadata[key]
    if isinstance(facts, TensorStorageMetadata) != isinstance(value, Tensor):
        raise ValueError(f"{folder}: '{key}' is no tensor, or should not be one")
    if not isinstance(facts, TensorStorageMetadata):
        return
    if facts.size != value.shape:
        raise ValueError(
            f"{folder}: '{key}' has shape {shown(tuple(facts.size))}, expected {tuple(value.shape)}"
        )
    kinds = [dtype.is_floating_point for dtype in (facts.properties.dtype, value.dtype)]
    if kinds[0] != kinds[1] or facts.properties.dtype.is_complex != value.dtype.is_complex:
        raise ValueError(f"{folder}: '{key}' is {facts.properties.dtype}, expected {value.dtype}")


def fit_optimizer(
    model: nn.Module, optimizer: Optimizer, groups: list[State], metadata: Metadata, folder: object
) -> State:
    """The optimizer's states that the checkpoint has, on its own memory, and options of groups.

    States are made where there are none yet, of memory that holds anything, and stay if this
    raises. A parameter may lack its state as a whole.

    Args:
        groups: the saved ones. An option that they lack keeps its value.

    Raises:
        ValueError: other parameters, groups, states or shapes; names folder and key.
    """
    own_groups = _by_names(model, optimizer)["param_groups"]
    if [group["params"] for group in groups] != [group["params"] for group in own_groups]:
        raise ValueError(
            f"{folder} has parameter groups of {_outline(groups)}, the optimizer of "
            f"{_outline(own_groups)}; build it as it was"
        )
    saved = {key for key in metadata.state_dict_metadata if key.startswith("optim.state.")}
    stated = {key.removeprefix("optim.state.").rpartition(".")[0] for key in saved}
    new = params_without_state(model, optimizer)
    with filled_later():
        make_states(optimizer)
    drop_states(model, optimizer, new - stated)
    state = {k: v for k, v in _by_names(model, optimizer)["state"].items() if k in stated}
    own = dict(flat(state, "optim.state."))
    missing, unexpected = sorted(set(own) - saved), sorted(saved - set(own))
    if missing or unexpected:
        raise ValueError(
            f"{folder} was saved with another kind of optimizer: missing {shown(missing)}, "
            f"unexpected {shown(unexpected)}"
        )
    for key, value in own.items():
        _check_tensor(key, value, metadata, folder)
    return {"state": state, "param_groups": groups}


def params_without_state(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Names of the optimizer's parameters that have no state yet."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = zip(_names(model, optimizer), params, strict=True)
    return {name for name, param in names if not optimizer.state.get(param)}


def drop_states(model: nn.Module, optimizer: Optimizer, names: set[str]) -> None:
    """Forgets the states of the parameters of these names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name, param in zip(_names(model, optimizer), params, strict=True):
        if name in names:
            optimizer.state.pop(param, None)


def _outline(groups: list[State]) -> str:
    return ", ".join(
        f"{len(group['params'])} ({shown(group['params'][:1])}...)" for group in groups
    )


def load_optimizer(model: nn.Module, optimizer: Optimizer, state: State) -> None:
    """Gives an optimizer the states and options of ``fit_optimizer``, whose tensors are loaded."""
    names = _names(model, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {numbers[name]: value for name, value in state["state"].items()}
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
    version, numbers, gauss = state["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.RandomState().set_state(tuple(state["numpy"]))


def set_random_state(state: State) -> None:
    """Continues the streams of ``random_state``."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
