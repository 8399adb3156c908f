"""Runs calls under torch.export, torch.jit.trace, make_fx or a FakeTensorMode without collectives.

One rank may trace alone, and traced tensors hold no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerocore.model.casting import cast_floats
from zerocore.model.units import Param
from zerocore.tensor.shown import take_class_of_torch

_C: Any = torch._C
_FAKE, _PROXY = _C._TorchDispatchModeKey.FAKE, _C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """Whether torch records operators, or runs them on fake tensors."""
    if _C._get_tracing_state() is not None:
        return True
    return _C._len_torch_dispatch_stack() > 0 and any(map(_C._get_dispatch_mode, (_FAKE, _PROXY)))


def call_traced(
    params: Iterable[Param],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Calls ``function`` with floating-point arguments and outputs of ``dtypes``. Raises
    RuntimeError if a parameter is sharded and its values would be read."""
    with _fakes_shown(params):
        return cast_around_call(dtypes, function, args, kwargs)


def cast_around_call(
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Calls ``function`` with floating-point arguments and outputs of ``dtypes``."""
    if dtypes[0] is not None:
        args, kwargs = cast_floats((args, kwargs), dtypes[0])
    output = function(*args, **kwargs)
    return output if dtypes[1] is None else cast_floats(output, dtypes[1])


@contextmanager
def _fakes_shown(params: Iterable[Param]) -> Iterator[None]:
    """Shows full parameters to a trace: under a FakeTensorMode, fake ones without gradients."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    shown: list[tuple[Any, type]] = []
    has_fakes = _C._get_dispatch_mode(_FAKE) is not None
    keeps_full = not has_fakes or _C._get_dispatch_mode(_PROXY) is not None  # as constants
    try:
        for param in params:
            owner, key = param.owners[0]
            held: Any = owner._parameters.get(key)
            if held is not param.object:
                continue  # modules hold a view, or the program's own tensor
            make = param.maker
            if param.is_full and (keeps_full or make is None):
                shown.append((held, type(held)))
                take_class_of_torch(held)
                continue
            if make is None or not has_fakes:
                raise RuntimeError(
                    f"parameter '{param.fqn}' is sharded, and a trace does not gather it. Run "
                    "torch.jit.trace or torch.export inside `with zerocore.unsharded(model):`, "
                    "which all ranks enter; for a fully_shard model, trace a plain model that has "
                    "loaded its full state dict"
                )
            fake = nn.Parameter(make(), requires_grad=held.requires_grad)
            for owner, name in param.owners:
                hidden.append((owner._parameters, name, held))
                owner._parameters[name] = fake
        yield
    finally:
        for entries, name, held in hidden:
            entries[name] = held
        for full, kind in reversed(shown):
            full.__class__ = kind
