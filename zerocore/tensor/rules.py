"""The rules of torch functions on shards, the same for all kinds of shards.

Element-wise functions work on the local elements. Norms and full reductions are global. Functions
read a parameter in full within a call of its model, if autograd records, and if the shape matters.
All other functions get the full values of all shards, which the ranks gather.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from zerocore.common import late
from zerocore.common.patching import around
from zerocore.tensor import functions, pending_host_updates
from zerocore.tensor.elementwise import NotLocal, apply, apply_operator, draw, fit, get_items
from zerocore.tensor.functions import Args, Function, Kwargs, is_foreach, is_in_place, name_of
from zerocore.tensor.held import call_held, keep_recipe
from zerocore.tensor.implicit_unshard import call_with_full, in_call, is_recorded
from zerocore.tensor.noted_writes import note_writes
from zerocore.tensor.pickling import forget_owners, keep_owner
from zerocore.tensor.placed import (
    Placed,
    PlacedParameter,
    keep_place,
    leaves,
    local_of,
    outline_of,
)
from zerocore.tensor.received import receives
from zerocore.tensor.reductions import foreach_norm, norm, reduce, unscale

_TEMPLATES = ("view_as", "reshape_as", "expand_as")
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm")


def call(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Applies a torch function to shards, for ``__torch_function__`` of all kinds."""
    name = name_of(func)
    with torch._C.DisableTorchFunctionSubclass():
        if name in functions.SHAPES:
            outlines = {key: outline_of(value) for key, value in kwargs.items()}
            return func(*(outline_of(value) for value in args), **outlines)
        pending_host_updates.finish()
        if name == "data" and not isinstance(args[0], PlacedParameter):
            torch.autograd.graph.increment_version(args[0])  # the caller may write through it
        if name in functions.ON_THE_SHARD or (name in ("__eq__", "__ne__") and args[1] is None):
            result = func(*args, **kwargs)
            return _alias(result, args[0]) if name in ("detach", "data") else result
        if is_foreach(name) and _changes_gradients(name, args):
            return func(*args, **kwargs)
        if getattr(func, "__module__", None) == "torch.nn.init":
            return initialise(func, args, kwargs)
        if name in _TEMPLATES:
            return _view_like(name, *args, **kwargs)
        shards = [value for value in leaves((args, kwargs)) if isinstance(value, Placed)]
        params = [shard for shard in shards if isinstance(shard, PlacedParameter)]
        changed = list(leaves(functions.changed_by(func, args, kwargs)))
        writes = any(isinstance(value, Placed) for value in changed)
        if params and any(in_call(param) for param in params):
            return call_with_full(func, args, kwargs, params)
        if receives(func, args, kwargs):
            return late.call("receive", func, args, kwargs)
        if name in functions.FACTORIES and not _reads_shard(args, kwargs):
            return func(*args, **kwargs)
        if name in functions.MEMORY or (name in functions.CLASSES and not params):
            late.call("refuse", name, shards[0])
        if writes:
            _check_no_leaf(name, changed)
        elif is_recorded((args, kwargs)) and functions.base_of(name) not in functions.LIKES:
            return call_with_full(func, args, kwargs, params)
        if hooks.of_gradient and _is_beside_full(shards, args, kwargs):
            return late.call("call_gathered", func, args, kwargs, changed, "")
        result = _on_shards(func, args, kwargs, changed)
        forget_owners(changed)
        note_writes(name, changed if writes else (), [*args[1:], *kwargs.values()])
        return keep_owner(result, shards[0]) if name in functions.CLONES else result


def _alias(result: Any, shard: Any) -> Any:
    return keep_owner(keep_place(result, shard), shard)


class _Hooks(threading.local):
    of_gradient = 0  # hooks that run on this thread, and get this rank's own full gradient


hooks = _Hooks()


def _is_beside_full(shards: list[Placed], args: Args, kwargs: Kwargs) -> bool:
    """Whether a plain tensor of the full shape stands beside a shard."""
    shapes = {shard.place.global_shape for shard in shards}
    tensors = (value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
    return any(not isinstance(value, Placed) and value.shape in shapes for value in tensors)


def _reads_shard(args: Args, kwargs: Kwargs) -> bool:
    """Whether a factory reads values of a shard, not only its dtype and device."""
    return any(isinstance(value, Placed) for value in (*args[1:], *kwargs.values()))


def needs_values(func: Function, args: Args) -> bool:
    """Whether a torch function reads or changes elements."""
    name = name_of(func)
    if name in ("__eq__", "__ne__"):
        return args[1] is not None
    asks = name not in functions.SHAPES and name not in functions.ON_THE_SHARD
    return asks or name in ("detach", "data", "data=")


def _changes_gradients(name: str, args: Args) -> bool:
    """Whether the function changes one list of gradients by numbers only, as clipping does in each
    step. Such a change is local at any place, and this test is fast."""
    return (
        is_in_place(name)
        and functions.is_pointwise(functions.base_of(name))
        and all(isinstance(t, Placed) and not isinstance(t, PlacedParameter) for t in args[0])
        and all(
            isinstance(value, int | float)
            or (isinstance(value, Tensor) and not isinstance(value, Placed) and value.dim() == 0)
            for value in args[1:]
        )
    )


def _on_shards(func: Function, args: Args, kwargs: Kwargs, changed: list[Any]) -> Any:
    reason = ""
    try:
        result = _local_or_global(func, args, kwargs, changed)
        if result is not NotImplemented:
            is_random = functions.base_of(name_of(func)) in functions.RANDOM
            if isinstance(result, Placed) and not (changed or is_random):
                keep_recipe(func, args, kwargs, result)
            return result
    except NotLocal as error:
        reason = str(error)
    params = any(isinstance(value, PlacedParameter) for value in leaves((args, kwargs)))
    if not (changed or params) and (held := call_held(func, args, kwargs)) is not NotImplemented:
        return held
    return late.call("call_gathered", func, args, kwargs, changed, reason)


def _local_or_global(func: Function, args: Args, kwargs: Kwargs, changed: list[Any]) -> Any:
    """Runs a local or a global function; else returns NotImplemented, or raises NotLocal."""
    if functions.is_elementwise(func):
        return apply_operator(func, args, kwargs, changed)
    name = name_of(func)
    base = functions.base_of(name)
    if name == "__getitem__":
        return get_items(args[0], args[1])
    if name == "__setitem__":
        return _set_items(*args)
    if base == "_amp_foreach_non_finite_check_and_unscale":
        return unscale(func, *args, **kwargs)
    if base in functions.RANDOM and (is_in_place(name) or name.endswith("_like")):
        result = draw(func, name, args[0], args, kwargs)
        return args[0] if is_in_place(name) else keep_place(result, args[0])
    pair = base in ("max", "min") and len(args) == 2 and isinstance(args[1], Tensor)
    if base in functions.GLOBAL and not pair and not is_in_place(name):
        if not changed and (held := call_held(func, args, kwargs)) is not NotImplemented:
            return held
        if is_foreach(name):
            whole = foreach_norm(args, kwargs) if base == "norm" else NotImplemented
            return [reduce(torch.max, base, (t,), {}) for t in args[0]] if base == "max" else whole
        return (norm if base in _NORMS else reduce)(func, base, args, kwargs)
    if pair or functions.is_pointwise(base):
        return apply(func, name, base, args, kwargs)
    return NotImplemented


def _set_items(changed: Any, index: Any, value: Any) -> Any:
    """Runs ``shard[:] = value``, ``shard[mask] = number`` and ``plain[start:end] = shard``."""
    is_all = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    if not isinstance(changed, Placed) and isinstance(value, Placed):
        pair: list[Any] = [changed[index], value]
        changed[index] = fit(pair, True)[1]
    elif not isinstance(changed, Placed):
        return NotImplemented
    elif is_all and isinstance(value, Tensor):
        apply(Tensor.copy_, "copy_", "copy", (changed, value), {})
    elif is_all:
        local_of(changed).fill_(value)
    elif isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(value, Tensor):
        masked: Any = Tensor.masked_fill_
        apply(masked, "masked_fill_", "masked_fill", (changed, index, value), {})
    else:
        return NotImplemented
    return None


def _view_like(name: str, tensor: Tensor, other: Tensor) -> Any:
    """Runs a ``*_as`` function with a shard's full shape, which the function would not see."""
    view = getattr(Tensor, name.removesuffix("_as"))
    if tensor is other and isinstance(tensor, PlacedParameter) and is_recorded(tensor):
        full = tensor.full  # programs look for the node that accumulates its gradient
        return full.view_as(full)
    args = (tensor, outline_of(other).shape)
    return call(view, args, {}) if isinstance(tensor, Placed) else view(*args)


def _check_no_leaf(name: str, changed: list[Any]) -> None:
    for shard in changed:
        if isinstance(shard, PlacedParameter) and torch.is_grad_enabled() and shard.requires_grad:
            raise RuntimeError(
                f"{name}() changes parameter '{shard.fqn}', a leaf that requires grad, in place. "
                "Call it under torch.no_grad()"
            )


def initialise(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Runs a function of ``torch.nn.init`` on the full shape, and copies this rank's part.

    With equal seeds on all ranks, the values are the same as in a model that is not sharded.
    """
    shard, rest = (args[0], args[1:]) if args else (kwargs["tensor"], ())
    kwargs = {key: value for key, value in kwargs.items() if key != "tensor"}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        local = local_of(shard)
        full = shard.place.like_full(local)
        func(full, *rest, **kwargs)
        local.copy_(shard.place.part_of(full))
    return shard


@around
def initialises_shards(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps a function of ``torch.nn.init``, so that it sees the full shape of shards.

    Most read the number of dimensions before they call a torch function, and some return early from
    an empty tensor without drawing numbers.
    """
    tensor = args[0] if args else kwargs.get("tensor")
    if isinstance(tensor, Placed):
        return initialise(function, args, kwargs)
    return function(*args, **kwargs)
