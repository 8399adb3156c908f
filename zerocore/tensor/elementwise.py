"""Runs element-wise functions on local elements: fits their arguments, and wraps their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting
from zerocore.layout.cuts import taken
from zerocore.layout.place import Place
from zerocore.tensor import functions
from zerocore.tensor.functions import Args, Function, Kwargs, is_foreach, is_in_place, name_of
from zerocore.tensor.placed import Placed, PlacedParameter, keep_place, local_of, outline_of


class NotLocal(Exception):
    """The error of arguments that do not fit together element by element; the text says why."""


def apply(func: Function, name: str, base: str, args: Args, kwargs: Kwargs) -> Any:
    """Calls ``func`` on local elements, and returns shards; raises NotLocal before any change."""
    if is_foreach(name):
        return _apply_foreach(func, name, args, kwargs)
    if base in functions.VIEWS:
        return _view(func, args, kwargs)
    if base == "where" and len(args) + len(kwargs) == 1:
        raise NotLocal("; with only a condition, it returns indices")
    return _apply_one(func, name, args, kwargs, base in functions.COPIES)


def _apply_one(func: Function, name: str, args: Args, kwargs: Kwargs, is_copy: bool = False) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    source = source_of(tensors)
    fitted = tensors if is_copy else fit(tensors, is_in_place(name), kwargs.get("out"))
    replaced = {id(old): new for old, new in zip(tensors, fitted, strict=True)}
    result = func(
        *(replaced.get(id(value), value) for value in args),
        **{key: replaced.get(id(value), value) for key, value in kwargs.items()},
    )
    for old, new in replaced.items():
        if result is new:  # an in-place function returns its argument
            return next(tensor for tensor in tensors if id(tensor) == old)
    return _wrapped(result, source)


def source_of(tensors: Iterable[Any]) -> Placed:
    """Returns the shard whose place the results have."""
    sources = [value for value in tensors if isinstance(value, Placed)]
    return next((value for value in sources if value.place.group is not None), sources[0])


def _wrapped(result: Any, source: Placed) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(item, source) for item in result)
    return keep_place(result, source)


def apply_operator(func: Function, args: Args, kwargs: Kwargs, changed: list[Any]) -> Any:
    """Does the same as :func:`apply` for an operator that a program has declared element-wise."""
    tensors = [value for value in changed if isinstance(value, Tensor)]
    for tensor in tensors:
        if not isinstance(tensor, Placed):
            raise NotLocal(
                f"; it also changes a plain tensor of shape {tuple(tensor.shape)} "
                "(torch.zeros_like of the parameter makes a sharded one)"
            )
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)  # a kernel may not, or not on all ranks
    if functions.returns_nothing(func) and not any(local_of(tensor).numel() for tensor in tensors):
        return None  # kernels may not support empty tensors
    has_lists = any(_is_list(value) for value in (*args, *kwargs.values()))
    run = _apply_foreach if has_lists else _apply_one
    return run(func, name_of(func), args, kwargs)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)


def _apply_foreach(func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    values = [*args, *kwargs.values()]
    if any(isinstance(value, Placed) for value in values):
        raise NotLocal("; other arguments are lists of tensors")
    lists = [index for index, value in enumerate(values) if _is_list(value)]
    rows = list(zip(*(values[index] for index in lists), strict=True))
    fitted = [_fit_row(name, row) for row in rows]
    for index, column in zip(lists, zip(*fitted, strict=True), strict=True):
        values[index] = list(column)
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    results = func(*values[: len(args)], **named)
    if results is None:
        return None
    sources = [next((t for t in row if isinstance(t, Placed)), None) for row in rows]
    return [
        result if source is None else keep_place(result, source)
        for result, source in zip(results, sources, strict=True)
    ]


def _fit_row(name: str, row: Sequence[Any]) -> list[Any]:
    tensors = [value for value in row if isinstance(value, Tensor)]
    if not any(isinstance(tensor, Placed) for tensor in tensors):
        return list(row)
    replaced = iter(fit(tensors, is_in_place(name)))
    return [next(replaced) if isinstance(value, Tensor) else value for value in row]


def fit(tensors: list[Tensor], in_place: bool, out: Tensor | None = None) -> list[Tensor]:
    """Returns plain local tensors for ``tensors``, or full ones if they change a full one.

    Moves shards to the place of the changed one, or of the first one; if their places differ, all
    ranks must call. A plain tensor may have one element, the full shape (this rank takes its part)
    or the shard's shape. If the changed one is plain and has the full shape, the shards are
    gathered, and all ranks must call. Raises NotLocal.
    """
    sources = [tensor for tensor in tensors if isinstance(tensor, Placed)]
    sources.sort(key=lambda source: source.place.group is None)  # a shard with a group comes first
    changed = out if out is not None else tensors[0] if in_place else None
    first = changed if isinstance(changed, Placed) else sources[0]
    place, local_shape = first.place, local_of(first).shape
    for other in sources:
        if not place.can_take(other.place):
            raise NotLocal(
                f"; argument '{other.fqn}'{other.place.origin} is sharded differently ({other!r})"
            )
    if changed is not None and not isinstance(changed, Placed):
        if _is_full(changed, place, local_shape):
            return [place.gather(local_of(t)) if isinstance(t, Placed) else t for t in tensors]
        if changed.shape != local_shape:
            raise NotLocal(f"; it changes a plain tensor of shape {tuple(changed.shape)}")
    # A plain tensor that is changed in place stays the same object.
    kept = None if isinstance(changed, Placed) else changed
    return [t if t is kept else _fit_one(t, place, local_shape) for t in tensors]


def _fit_one(tensor: Tensor, place: Place, local_shape: torch.Size) -> Tensor:
    if isinstance(tensor, Placed):
        return place.take(local_of(tensor), tensor.place)
    if tensor.shape == place.global_shape:
        return place.part_of(tensor)
    if tensor.numel() == 1 and tensor.dim() <= max(1, len(place.global_shape)):
        return tensor.view(-1) if tensor.dim() > 1 else tensor
    is_vector = tensor.dim() == 1 and len(place.global_shape) > 1
    is_row = is_vector and tensor.numel() == place.global_shape[-1] and place.group is not None
    is_column = is_vector and place.global_shape[-1] == 1  # a vector broadcasts to a matrix
    if tensor.shape == local_shape and not is_row and not is_column:
        return tensor
    # On one rank, a row of the full matrix may have the shape of the local elements.
    raise NotLocal(
        f"; another argument is a plain tensor of shape {tuple(tensor.shape)} (torch.zeros_like of "
        "the parameter makes a sharded one)"
    )


def _is_full(changed: Tensor, place: Place, local_shape: torch.Size) -> bool:
    """Whether a changed plain tensor is a full one; the same on all ranks. If one rank owns all of
    a vector, its local shape equals the full shape, so the ranks vote."""
    is_full, is_local = changed.shape == place.global_shape, changed.shape == local_shape
    if place.group is None or len(place.global_shape) != 1:
        return is_full
    votes = torch.tensor(
        [is_full and not is_local, is_local and not is_full],
        dtype=torch.int64,
        device=changed.device,
    )
    with waiting(place.group, f"an in-place change that reads '{place.fqn}'"):
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=place.group)
    full, local = votes.tolist()
    if full and local:
        raise NotLocal("; some ranks change a full tensor, other ranks a local one")
    return bool(is_full and not local)


def _view(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Returns the local elements as this rank's part of a tensor of another shape."""
    source: Any = source_of((*args, *kwargs.values()))
    if isinstance(source, PlacedParameter):
        raise NotLocal("")  # views of a parameter read the full value
    before = outline_of(source)
    outlines = {key: outline_of(value) for key, value in kwargs.items()}
    after = func(*(outline_of(value) for value in args), **outlines)
    is_same = after.stride() == before.stride() and after.shape == before.shape
    in_order = before.is_contiguous() and after.is_contiguous()
    if after.dtype != before.dtype or not (is_same or in_order):
        raise NotLocal("; its result has the elements in another order")
    result = keep_place(source.detach(), source)
    result.place = replace(source.place, global_shape=after.shape)
    return result


def get_items(shard: Any, index: Any) -> Any:
    """Returns ``shard[:]``, or any slice of a vector, as a view in the same order, or NotLocal."""
    shape = shard.place.global_shape
    if isinstance(shard, PlacedParameter) or not isinstance(shard, Placed):
        raise NotLocal("")
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None) and len(shape) > 0):
        return keep_place(local_of(shard), shard)
    if not isinstance(index, slice) or len(shape) != 1 or (index.step or 1) < 1:
        raise NotLocal("")
    whole = range(shape[0])[index]
    first, last = taken(whole, shard.shard_range)  # the slice's items that this rank has
    begin = whole[first] - shard.shard_range[0] if first < last else 0
    part = local_of(shard)[begin :: whole.step][: last - first]
    kind: Any = type(shard)
    result = part.as_subclass(kind.result_type)
    cut = shard.place.cut
    result.place = replace(
        shard.place,
        global_shape=torch.Size([len(whole)]),
        shard_range=(first, last),
        strides=None,
        cut=None if cut is None else replace(cut, slices=(*cut.slices, whole)),
    )
    return result


def draw(func: Function, name: str, shard: Placed, args: Any, kwargs: Any) -> Tensor:
    """Draws random numbers for the full shape, and returns this rank's part, plain.

    So the same seed gives the same numbers as on a model that is not sharded.
    """
    local = local_of(shard)
    if any(isinstance(value, Placed) for value in (*args[1:], *kwargs.values())):
        raise NotLocal("; other arguments are sharded, too")
    full = func(shard.place.like_full(local), *args[1:], **kwargs)
    part = shard.place.part_of(full)
    return local.copy_(part) if is_in_place(name) else part.clone()
