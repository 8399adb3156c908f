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

from zerocore.checkpoint.plain_values import as_leaf, leaf_value, put_together, taken_apart
from zerocore.checkpoint.safe_files import shown
from zerocore.hooks.loading import as_loaded, has_own_loading
from zerocore.hooks.optimizer_states import (
    NUMBERS,
    filled_later,
    first_keys,
    make_states,
    makes_all,
    params_of,
)
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import as_range, as_rows, own_elements, place_of
from zerocore.tensor.shard import as_shard

State = dict[str, Any]
_OTHERS = "zerocore_other_states"  # among a first group's options: states of no parameter
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
        if _averages(each):  # parameters that another one updates
            continue
        own = {id(param) for param in params_of(each)}
        if shared := [param for param in params_of(each) if id(param) in seen]:
            raise ValueError(
                f"optimizer: two of the list hold '{getattr(shared[0], 'fqn', shared[0])}'; give "
                "each parameter to one of them"
            )
        seen |= own
    return optimizers


def _averages(optimizer: Optimizer) -> bool:
    """Whether it keeps averages of parameters, as :class:`zerocore.weights.EMA`."""
    return getattr(optimizer, "averages_params", False)


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
    resize_buffers(model, state)
    model.load_state_dict({key: as_rows(value, owners[key]) for key, value in state.items()})


def resize_buffers(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Gives buffers that have grown or shrunk the sizes of the values to be loaded."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value: Any = values.get(f"{prefix}.{name}" if prefix else name)
            is_plain = isinstance(value, Tensor) and not isinstance(value, Placed)
            if is_plain and buffer is not None and value.shape != buffer.shape:
                module._buffers[name] = buffer.new_empty(value.shape)


def resized(state: State, metadata: Metadata) -> State:
    """A model's state with memory of the saved sizes for buffers of others."""
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


def _by_names(model: nn.Module, optimizers: Optimizers) -> State:
    merged: State = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        params, packed = _names(model, optimizer), optimizer.state_dict()
        names, others = list(params), {}
        for index, state in packed["state"].items():
            if not isinstance(index, int) or not isinstance(state, Mapping):
                others[index] = state  # of no parameter
                continue
            param = params[names[index]]
            apart = taken_apart(state, f"the optimizer's state of '{names[index]}'")
            known = merged["state"].setdefault(names[index], {})
            known.update({k: as_range(v, param) for k, v in apart.items()})
        groups = [{**group} for group in packed["param_groups"]]
        if others:
            groups[0][_OTHERS] = others
        merged["param_groups"].extend(_named_group(group, names) for group in groups)
    return merged


def _named_group(group: State, names: list[str]) -> State:
    options = {k: as_leaf(v, f"the optimizer's option '{k}'") for k, v in group.items()}
    return {**options, "params": [names[index] for index in group["params"]]}


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


def names_by_hooks(model: nn.Module, metadata: Metadata) -> dict[str, str]:
    """By a saved name, the one in ``model.state_dict()`` that the model's hooks of loading give it;
    only where these differ. Hooks that change values do not count."""
    if not has_own_loading(model):
        return {}
    empty = {
        key.removeprefix("model."): torch.empty((), dtype=facts.properties.dtype).expand(facts.size)
        for key, facts in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(facts, TensorStorageMetadata)
    }
    try:
        loaded = as_loaded(model, empty)
    except ValueError:  # shapes differ, which is said in full later
        return {}
    saved = {id(value): key for key, value in empty.items()}
    return {old: key for key, value in loaded.items() if (old := saved.get(id(value), key)) != key}


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
    new: set[str],
    groups: list[State],
    metadata: Metadata,
    folder: object,
) -> State:
    """The optimizers' states that the checkpoint has, on their own memory, and its ``groups``, of
    whose options a missing one keeps its value. ValueError that names folder and key for others.

    States are made where there are none yet (``new``), of memory that holds anything, and stay if
    this raises. A parameter may lack its state as a whole.
    """
    if not groups:
        raise ValueError(f"{folder} holds no optimizer's state")
    saved = saved_states(metadata)
    with filled_later():
        for optimizer in optimizers:
            make_states(optimizer)
    drop_states(model, optimizers, new - set(saved))
    own, own_groups = _by_names(model, optimizers).values()
    if [group["params"] for group in groups] != [group["params"] for group in own_groups]:
        raise ValueError(
            f"{folder} has parameter groups of {_outline(groups)}, the optimizer of "
            f"{_outline(own_groups)}; build it as it was"
        )
    trouble = f"{folder} was saved with another kind of optimizer"
    wanted: State = {}
    for optimizer in optimizers:
        params = {name: p for name, p in _names(model, optimizer).items() if name in saved}
        _check_keys(optimizer, params, saved, trouble)
        for name, states in _targets(optimizer, params, own, saved).items():
            wanted.setdefault(name, {}).update(states)
    return {"state": {k: wanted[k] for k in (*own, *wanted) if k in wanted}, "param_groups": groups}


def _check_keys(optimizer: Optimizer, params: State, saved: State, trouble: str) -> None:
    """Raises ValueError if a parameter lacks a state that its first step makes; matrices may have
    others in place of those of vectors, by which first steps are known."""
    needed = first_keys(optimizer)
    found = {key for name in params for key in saved[name]}
    for name, param in params.items():
        own = needed(param)
        allowed = found if saved[name].keys() - own else saved[name].keys()
        if missing := sorted(own - allowed):
            keys = [f"optim.state.{name}.{key}" for key in missing]
            raise ValueError(f"{trouble}: missing {shown(keys)}")


def _targets(optimizer: Optimizer, params: State, own: State, saved: State) -> State:
    """The memory for the saved states of an optimizer's parameters, by name and key."""
    others = _other_keys(params, saved)
    found: State = {}
    for name, param in params.items():
        facts, known = saved[name], own.get(name, {})
        states: State = {}
        found[name] = states
        for key in [*(k for k in known if k in facts), *(k for k in facts if k not in known)]:
            if (key == "average") != _averages(optimizer):  # of another optimizer
                continue
            is_other = key in others and isinstance(known.get(key), Placed)
            used = None if is_other else known.get(key)
            make = None if makes_all(optimizer) or key in others else param
            states[key] = _target(f"optim.state.{name}.{key}", used, facts[key], make)
    return found


def _other_keys(params: State, saved: State) -> set[str]:
    """Keys of states that are not a parameter's elements: of some parameter they have another
    shape."""
    return {
        key
        for name, param in params.items()
        for key, facts in saved[name].items()
        if isinstance(facts, TensorStorageMetadata) and facts.size.numel() != 1
        if facts.size != (param.place.whole_shape if isinstance(param, Placed) else param.shape)
    }


def saved_states(metadata: Metadata) -> dict[str, State]:
    """The states that a checkpoint has: parameter, key, and what is known of each."""
    found: dict[str, State] = {}
    paths: Any = metadata.planner_data or {}
    for full, facts in metadata.state_dict_metadata.items():
        if full.startswith("optim.state."):
            name, _, key = full.removeprefix("optim.state.").rpartition(".")
            path = paths.get(full, ())
            if full == ".".join(map(str, path)) and isinstance(path[2], str):
                name, key = path[2], full.removeprefix(f"optim.state.{path[2]}.")
            found.setdefault(name, {})[key] = facts
    return found


def _target(key: str, known: Any, facts: Any, param: Any) -> Any:
    """Memory to load a saved state into: ``known``, or a new tensor. The new one is sharded like
    ``param`` if it has that shape. Raises ValueError if the dtypes differ."""
    if not isinstance(facts, TensorStorageMetadata):
        return None
    dtype, shape = facts.properties.dtype, facts.size
    if isinstance(known, Tensor):
        own = known.place.whole_shape if isinstance(known, Placed) else known.shape
        if own == shape:
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
        for name, param in _names(model, optimizer).items()
        if not optimizer.state.get(param)
    }


def drop_states(model: nn.Module, optimizers: Optimizers, names: set[str]) -> None:
    for optimizer in optimizers if names else ():
        for name, param in _names(model, optimizer).items():
            if name in names:
                optimizer.state.pop(param, None)


def _outline(groups: list[State]) -> str:
    return ", ".join(
        f"{len(group['params'])} ({shown(group['params'][:1])}...)" for group in groups
    )


def _options(saved: State, own: State) -> State:
    """A saved group's options, tensors where the optimizer has them."""
    options = {key: leaf_value(value) for key, value in saved.items()}
    for key, value in options.items():
        if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
            options[key] = value.to(own[key].device)
    return options


def load_optimizers(model: nn.Module, optimizers: Optimizers, state: State) -> None:
    """Gives optimizers states and options of ``fit_optimizers``, whose tensors are loaded."""
    saved = iter(state["param_groups"])
    for optimizer in optimizers:
        params = _names(model, optimizer)
        numbers = {name: number for number, name in enumerate(params)}
        num_groups = len(optimizer.param_groups)
        groups = [
            {**_options(group, own), "params": [numbers[name] for name in group["params"]]}
            for own, group in zip(optimizer.param_groups, islice(saved, num_groups), strict=True)
        ]
        states = {
            numbers[name]: put_together(
                {
                    k: as_rows(v, params[name])
                    for k, v in values.items()
                    if (k == "average") == _averages(optimizer)
                }
            )
            for name, values in state["state"].items()
            if name in numbers
        }
        states |= groups[0].pop(_OTHERS, {})
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
