"""Runs calls under torch.export, torch.jit.trace, make_fx or a FakeTensorMode without collectives.

One rank may trace alone, and traced tensors hold no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerocore.model.casting import cast_floats
from zerocore.tensor.shown import take_class_of_torch

_C: Any = torch._C
_FAKE, _PROXY = _C._TorchDispatchModeKey.FAKE, _C._TorchDispatchModeKey.PROXY


class TracedParam(NamedTuple):
    """A parameter of a model that may be traced."""

    fqn: str
    owners: list[tuple[nn.Module, str]]
    param: Tensor  # modules hold it, unless they hold a view or the program's own tensor
    is_full: bool  # ``param`` is the full parameter
    make: Callable[[], Tensor] | None  # makes a tensor like the full one; None if that is a view


def is_traced() -> bool:
    """Whether torch records operators, or runs them on fake tensors."""
    if _C._get_tracing_state() is not None:
        return True
    return _C._len_torch_dispatch_stack() > 0 and any(map(_C._get_dispatch_mode, (_FAKE, _PROXY)))


def call_traced(
    params: Iterable[TracedParam],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Calls ``function`` with floating-point arguments and outputs of ``dtypes``. Raises
    RuntimeError if a parameter is sharded and its values would be read."""
    with _fakes_shown(params):
        if dtypes[0] is not None:
            args, kwargs = cast_floats((args, kwargs), dtypes[0])
        output = function(*args, **kwargs)
        return output if dtypes[1] is None else cast_floats(output, dtypes[1])


@contextmanager
def _fakes_shown(params: Iterable[TracedParam]) -> Iterator[None]:
    """Shows full parameters to a trace: under a FakeTensorMode, fake ones without gradients."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    shown: list[tuple[Any, type]] = []
    has_fakes = _C._get_dispatch_mode(_FAKE) is not None
    keeps_full = not has_fakes or _C._get_dispatch_mode(_PROXY) is not None  # as constants
    try:
        for fqn, owners, param, is_full, make in params:
            held = owners[0][0]._parameters.get(owners[0][1])
            if held is not param:
                continue
            if is_full and (keeps_full or make is None):
                shown.append((param, type(param)))
                take_class_of_torch(param)
                continue
            if make is None or not has_fakes:
                raise RuntimeError(
                    f"parameter '{fqn}' is sharded, and a trace does not gather it. Run "
                    "torch.jit.trace or torch.export inside `with zerocore.unsharded(model):`, "
                    "which all ranks enter; for a fully_shard model, trace a plain model that has "
                    "loaded its full state dict"
                )
            fake = nn.Parameter(make(), requires_grad=param.requires_grad)
            for owner, name in owners:
                hidden.append((owner._parameters, name, held))
                owner._parameters[name] = fake
        yield
    finally:
        for entries, name, held in hidden:
            entries[name] = held
        for param, kind in reversed(shown):
            param.__class__ = kind
