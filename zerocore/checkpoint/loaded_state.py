"""Fits a checkpoint to a model and its optimizers: checks it, makes memory, and loads it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerocore.checkpoint.containers import put_together
from zerocore.checkpoint.plain_values import leaf_value
from zerocore.checkpoint.safe_files import shown
from zerocore.checkpoint.training_state import (
    OTHERS,
    Optimizers,
    State,
    averages,
    names_of,
    states_by_names,
)
from zerocore.hooks.first_states import first_keys, make_states, tried
from zerocore.hooks.loading import as_loaded, has_own_loading
from zerocore.hooks.optimizer_states import AVERAGE, NUMBERS, filled_later, makes_all
from zerocore.tensor.placed import Placed, leaves
from zerocore.tensor.rows import as_rows, own_elements, place_of
from zerocore.tensor.shard import as_shard


def check_parts(model: nn.Module, objects: Mapping[str, Any], saved_on: int, ranks: int) -> None:
    """Raises ValueError if the loaded state of an object holds a part of a parameter that is not
    this rank's part now."""
    places: Any = {p.place.fqn: p.place for p in model.parameters() if isinstance(p, Placed)}
    for name, value in objects.items():
        for part in (v for v in leaves(value) if isinstance(v, Placed) and not v.place.is_whole):
            place = places.get(part.place.fqn)
            if place is not None and place.global_shape != part.place.global_shape:
                place = None  # a parameter of another model
            if saved_on != ranks or (place is not None and place.elements != part.place.elements):
                now = "" if place is None else f", and this rank's are now {place.text}"
                raise ValueError(
                    f"the state of {name!r} holds one rank's part of '{part.place.fqn}', elements "
                    f"{part.place.text}, saved on {saved_on} ranks{now} on {ranks}. Let its "
                    "state_dict return value.full_tensor() for each shard; or load it at the stage "
                    "and on the number of ranks that saved it"
                )


def load_model(model: nn.Module, state: State) -> None:
    """Loads the model from the tensors of :func:`training_state`, which hold the new values."""
    owners = model.state_dict(keep_vars=True)
    resize_buffers(model, state)
    model.load_state_dict({key: as_rows(value, owners[key]) for key, value in state.items()})


def resize_buffers(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Resizes buffers whose values to load have another shape."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value: Any = values.get(f"{prefix}.{name}" if prefix else name)
            is_plain = isinstance(value, Tensor) and not isinstance(value, Placed)
            if is_plain and buffer is not None and value.shape != buffer.shape:
                module._buffers[name] = buffer.new_empty(value.shape)


def resized(state: State, metadata: Metadata) -> State:
    """Returns a model's state with new memory for buffers whose saved shape differs."""
    facts = metadata.state_dict_metadata
    sizes: State = {key: getattr(facts.get(f"model.{key}"), "size", None) for key in state}
    return {
        key: value
        if not isinstance(value, Tensor)
        or isinstance(value, Placed)
        or sizes[key] in (None, value.shape)
        else value.new_empty(sizes[key])
        for key, value in state.items()
    }


def names_by_hooks(model: nn.Module, metadata: Metadata) -> dict[str, str]:
    """Returns the saved names that the model's loading hooks change, with the new names in
    ``model.state_dict()``. Hooks that change values do not count."""
    if not has_own_loading(model):
        return {}
    empty = {
        key.removeprefix("model."): torch.empty((), dtype=facts.properties.dtype).expand(facts.size)
        for key, facts in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(facts, TensorStorageMetadata)
    }
    try:
        loaded = as_loaded(model, empty)
    except ValueError:  # shapes differ; later checks report that in full
        return {}
    saved = {id(value): key for key, value in empty.items()}
    return {old: key for key, value in loaded.items() if (old := saved.get(id(value), key)) != key}


def check_tensors(state: State, prefix: str, metadata: Metadata, trouble: str) -> None:
    """Rejects a checkpoint whose tensors of this prefix do not fit; a ValueError names the key."""
    saved = {key for key in metadata.state_dict_metadata if key.startswith(prefix)}
    values = {f"{prefix}{key}": value for key, value in flatten_state_dict(state)[0].items()}
    missing, unexpected = sorted(set(values) - saved), sorted(saved - set(values))
    if missing or unexpected:
        raise ValueError(f"{trouble}: missing {shown(missing)}, unexpected {shown(unexpected)}")
    for key, value in values.items():
        _check_tensor(key, value, metadata.state_dict_metadata[key], trouble)


def _check_tensor(key: str, value: Any, facts: Any, trouble: str) -> None:
    if isinstance(facts, TensorStorageMetadata) != isinstance(value, Tensor):
        raise ValueError(f"{trouble}: '{key}' is a tensor only in the model or only in the file")
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
    new: set[str],
    groups: list[State],
    metadata: Metadata,
    folder: object,
) -> State:
    """Returns memory for the checkpoint's states, and its ``groups``. Options that these lack keep
    their values. A ValueError names folder and key.

    Makes the missing states of parameters ``new`` with uninitialised memory; an error leaves these
    states. The checkpoint may lack all states of a parameter.
    """
    if not groups:
        raise ValueError(f"{folder} holds no optimizer's state; leave optimizer= out to load it")
    saved = saved_states(metadata)
    with filled_later():
        for optimizer in optimizers:
            tried(make_states, optimizer)  # else the file's facts say which states there are
    drop_states(model, optimizers, new - set(saved))
    own_states, own_groups = states_by_names(model, optimizers).values()
    if [group["params"] for group in groups] != [group["params"] for group in own_groups]:
        raise ValueError(
            f"{folder} has parameter groups of {_outline(groups)}, the optimizer of "
            f"{_outline(own_groups)}; build the optimizer as before the save"
        )
    trouble = f"{folder} was saved with another kind of optimizer"
    wanted: State = {}
    for optimizer in optimizers:
        params = {name: p for name, p in names_of(model, optimizer).items() if name in saved}
        _check_keys(optimizer, params, saved, trouble)
        for name, states in _targets(optimizer, params, own_states, saved).items():
            wanted.setdefault(name, {}).update(states)
    names = (name for name in (*own_states, *wanted) if name in wanted)
    return {"state": {name: wanted[name] for name in names}, "param_groups": groups}


def _check_keys(optimizer: Optimizer, params: State, saved: State, trouble: str) -> None:
    """Rejects a checkpoint that lacks a state which a parameter's first step makes. A step of a
    vector shows these states; a matrix may have other states instead."""
    needed = first_keys(optimizer)
    saved_keys = {key for name in params for key in saved[name]}
    for name, param in params.items():
        keys_of_param = needed(param)
        allowed = saved_keys if saved[name].keys() - keys_of_param else saved[name].keys()
        if missing := sorted(keys_of_param - allowed):
            keys = [f"optim.state.{name}.{key}" for key in missing]
            raise ValueError(f"{trouble}: missing {shown(keys)}")


def _targets(optimizer: Optimizer, params: State, own_states: State, saved: State) -> State:
    """Returns the memory for the saved states of an optimizer's parameters, by name and key."""
    unsharded = _unsharded_keys(params, saved)
    targets: State = {}
    for name, param in params.items():
        facts, known = saved[name], own_states.get(name, {})
        states: State = {}
        targets[name] = states
        for key in [*(k for k in known if k in facts), *(k for k in facts if k not in known)]:
            if (key == AVERAGE) != averages(optimizer):  # a state of another optimizer
                continue
            differs = key in unsharded and isinstance(known.get(key), Placed)
            used = None if differs else known.get(key)
            make = None if makes_all(optimizer) or key in unsharded else param
            states[key] = _target(f"optim.state.{name}.{key}", used, facts[key], make)
    return targets


def _unsharded_keys(params: State, saved: State) -> set[str]:
    """Returns the keys of states that are not element-wise: for some parameter, the state's shape
    is not the parameter's."""
    return {
        key
        for name, param in params.items()
        for key, facts in saved[name].items()
        if isinstance(facts, TensorStorageMetadata) and facts.size.numel() != 1
        if facts.size != (param.place.whole_shape if isinstance(param, Placed) else param.shape)
    }


def saved_states(metadata: Metadata) -> dict[str, State]:
    """Returns the metadata of a checkpoint's optimizer states, by parameter and key."""
    states: dict[str, State] = {}
    paths: Any = metadata.planner_data or {}
    for full, facts in metadata.state_dict_metadata.items():
        if full.startswith("optim.state."):
            name, _, key = full.removeprefix("optim.state.").rpartition(".")
            path = paths.get(full, ())
            if full == ".".join(map(str, path)) and isinstance(path[2], str):
                name, key = path[2], full.removeprefix(f"optim.state.{path[2]}.")
            states.setdefault(name, {})[key] = facts
    return states


def _target(key: str, known: Any, facts: Any, param: Any) -> Any:
    """Returns the memory to load a saved state into: ``known``, or a new tensor. The new one is
    sharded like ``param`` if it has that shape. Raises ValueError if the dtypes differ."""
    if not isinstance(facts, TensorStorageMetadata):
        return None
    dtype, shape = facts.properties.dtype, facts.size
    if isinstance(known, Tensor):
        full_shape = known.place.whole_shape if isinstance(known, Placed) else known.shape
        if full_shape == shape:
            _check_tensor(key, known, facts, "the optimizer's state does not fit")
            return known
    place = None if param is None else place_of(param)
    is_number = shape.numel() == 1 and key.rpartition(".")[2] in NUMBERS
    if place is None or place.whole_shape != shape or is_number:
        return torch.empty(shape, dtype=dtype, device="cpu")
    local = own_elements(param)
    return as_shard(torch.empty(local.numel(), dtype=dtype, device=local.device), place)


def params_without_state(model: nn.Module, optimizers: Optimizers) -> set[str]:
    return {
        name
        for optimizer in optimizers
        for name, param in names_of(model, optimizer).items()
        if not optimizer.state.get(param)
    }


def drop_states(model: nn.Module, optimizers: Optimizers, names: set[str]) -> None:
    for optimizer in optimizers if names else ():
        for name, param in names_of(model, optimizer).items():
            if name in names:
                optimizer.state.pop(param, None)


def _outline(groups: list[State]) -> str:
    return ", ".join(
        f"{len(group['params'])} ({shown(group['params'][:1])}...)" for group in groups
    )


def _options(saved: State, current: State) -> State:
    """Returns a saved group's options; moves tensors to the device of the current ones."""
    options = {key: leaf_value(value) for key, value in saved.items()}
    for key, value in options.items():
        if isinstance(value, Tensor) and isinstance(current.get(key), Tensor):
            options[key] = value.to(current[key].device)
    return options


def load_optimizers(model: nn.Module, optimizers: Optimizers, state: State) -> None:
    """Loads the states and options of :func:`fit_optimizers`, after their tensors were read."""
    saved = iter(state["param_groups"])
    for optimizer in optimizers:
        params = names_of(model, optimizer)
        numbers = {name: number for number, name in enumerate(params)}
        num_groups = len(optimizer.param_groups)
        groups = [
            {**_options(group, old), "params": [numbers[name] for name in group["params"]]}
            for old, group in zip(optimizer.param_groups, islice(saved, num_groups), strict=True)
        ]
        states = {
            numbers[name]: put_together(
                {
                    k: as_rows(v, params[name])
                    for k, v in values.items()
                    if (k == AVERAGE) == averages(optimizer)
                }
            )
            for name, values in state["state"].items()
            if name in numbers
        }
        states |= groups[0].pop(OTHERS, {})
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def check_random_state(state: State) -> None:
    """Raises an exception if the random streams cannot continue from a state; changes none."""
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
