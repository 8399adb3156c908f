"""Casts floating-point tensors in nested containers; plain Python that torch.compile can trace."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.model.units import NOT_CALLED
from zerocore.options.precision import MixedPrecision, param_types


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Returns ``value`` with every floating-point tensor in it cast to ``dtype``.

    Looks into tuples (also named ones), lists, dicts and dataclasses. Returns a container without a
    tensor to cast unchanged, and any other as a new one of its class. Leaves other objects alone.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple | list):
        items = [cast_floats(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # A named tuple's constructor takes its items as separate arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return _cast_dict(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    return value


def _changed(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    changed = {}
    for key, item in items:
        new = cast_floats(item, dtype)
        if new is not item:
            changed[key] = new
    return changed


def _cast_dict(value: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    changed = _changed(value.items(), dtype)
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    new = copy.copy(value)
    for key, item in changed.items():  # Hugging Face's outputs also set the attribute
        new[key] = item
    return new


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    changed = _changed([(name, getattr(value, name, None)) for name in names], dtype)
    if not changed:
        return value
    # replace() would run __init__ and __post_init__ again on values that they made.
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # frozen ones too
    return new


def cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    """Casts the floating-point inputs of ``module`` to ``inside``, its outputs to ``outside``."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_floats(args, inside), cast_floats(kwargs, inside)
        return cast_floats(forward(*args, **kwargs), outside)

    module.forward = cast_forward


def cast_around_kept(model: nn.Module, mixed: MixedPrecision) -> None:
    """Casts around the outermost modules whose parameters all keep their dtype."""
    if not mixed.cast_inputs:
        return

    def visit(name: str, module: nn.Module) -> None:
        params = list(module.named_parameters(name))
        all_kept = params and all(mixed.keeps(fqn) for fqn, _ in params)
        if all_kept and name and not isinstance(module, NOT_CALLED):
            fqn, first = params[0]
            inside = param_types(mixed, fqn, first.dtype, first.requires_grad).model
            outside = mixed.param_dtype or first.dtype
            if inside != outside:
                cast_around(module, inside, outside)
            return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's values as 1-D uint8; copies if it is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
