"""Applies the shards' rules in torch functions that bypass ``__torch_function__``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zerocore._C import count_view_as_data
from zerocore.common.patching import around
from zerocore.tensor import rules
from zerocore.tensor.functions import name_of
from zerocore.tensor.implicit_unshard import call_with_full
from zerocore.tensor.placed import Placed, PlacedParameter, full_value_of, leaves, local_of

_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled

# Pairs of a module or class, and the name of a function.
CONVERSIONS = (
    *(("torch", name) for name in ("tensor", "as_tensor", "asarray", "to_dlpack")),
    *(("torch.Tensor", name) for name in ("new_tensor", "new", "set_")),
    ("torch.utils.dlpack", "to_dlpack"),
)
# Functions that wrap a tensor for a transform of torch.func.
TRANSFORMS = (
    ("torch._functorch.vmap", "_add_batch_dim"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
)


@around
def converts_in_full(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps a function that converts a tensor: unshards parameters, rejects other shards."""
    if not any(isinstance(value, Placed) for value in (*args, *kwargs.values())):
        return function(*args, **kwargs)
    if not _enabled():
        return function(*args, **kwargs)
    if name_of(function) in ("as_tensor", "asarray"):
        result = function(*args, **kwargs)
        if isinstance(result, Placed):
            return result  # the argument itself
    return rules.call(function, args, kwargs)


def asks_in_full(call: Any) -> Any:
    """Wraps the call of a scripted or traced function, or of another one that takes lists."""

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _enabled() and any(isinstance(value, Placed) for value in leaves((args, kwargs))):
            return rules.call(run, args, kwargs)
        return call(*args, **kwargs)

    run.__name__, run.__module__ = call.__name__.replace("__call__", "script_function"), "torch"
    return run


@around
def transforms_full_values(wrap: Any, tensor: Any, *args: Any) -> Any:
    """Gives a torch.func transform the full value of a shard."""
    if isinstance(tensor, Placed):
        with temporarily_clear_interpreter_stack():
            tensor = _full(tensor)
    return wrap(tensor, *args)


def constructs_in_full(make: Any) -> Any:
    """Wraps ``__new__`` of ``torch.Tensor`` and ``torch.autograd.Variable``."""

    def new(*args: Any, **kwargs: Any) -> Any:  # Dynamo compares the signature
        if len(args) > 1 and isinstance(args[1], Placed) and _enabled():
            kind = torch.Tensor if args[0] is torch.Tensor else torch.autograd.Variable
            return rules.call(kind, args[1:], kwargs)
        return make(*args, **kwargs)

    return staticmethod(new)


def typed_in_full(kind: Any, args: Any) -> Any:
    """Returns the tensor that ``torch.FloatTensor`` and the like make of a shard, else None."""
    if isinstance(args[0], Placed) and _enabled():
        return rules.call(kind, args, {})
    return None


def subclasses_in_full(make: Any) -> Any:
    """Wraps ``Tensor._make_subclass``, which would put a class around one rank's elements."""

    # Dynamo compares the signature.
    def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        if isinstance(data, Placed) and not issubclass(cls, Placed) and _enabled():
            return rules.call(make_of, (data, cls, requires_grad), kwargs)
        return make(cls, data, requires_grad, **kwargs)

    def make_of(data: Any, cls: Any, requires_grad: bool, **kwargs: Any) -> Any:
        return make(cls, data, requires_grad, **kwargs)

    make_of.__name__, make_of.__module__ = "_make_subclass", "torch"
    return staticmethod(make_subclass)


@around
def keeps_class(as_subclass: Any, tensor: Any, cls: Any) -> Any:
    """Wraps ``Tensor.as_subclass``, which would drop a shard's rules."""
    if isinstance(tensor, Placed) and not issubclass(cls, Placed) and _enabled():
        return rules.call(as_subclass, (tensor, cls), {})
    return as_subclass(tensor, cls)


def takes_full_data(old: Any) -> property:
    """Wraps ``Tensor.data``.

    Writes to the ``data`` of a parameter's view count as writes to the parameter. If a plain
    tensor's ``data`` is set to a parameter, it gets the full value.
    """

    def get_data(tensor: Tensor) -> Any:
        alias = old.__get__(tensor)
        count_view_as_data(tensor, alias)
        return alias

    def set_data(tensor: Tensor, value: Any) -> None:
        if isinstance(tensor, Placed) and _enabled():
            is_full = not isinstance(value, Placed) and value.shape == tensor.place.global_shape
            value = tensor.place.part_of(value) if is_full else local_of(value)
        elif isinstance(value, Placed) and _enabled():
            value = _full(value).detach()
        old.__set__(tensor, value)

    get_data.__name__ = "data"  # the rules of shards know it by this name
    return property(get_data, set_data)


def _full(value: Any) -> Tensor:
    if isinstance(value, PlacedParameter):
        full: Tensor = call_with_full(torch.clone, (value,), {}, [value])
        return full
    return full_value_of(value)
