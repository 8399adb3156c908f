"""Functions that work on a shard's elements alone: what may stand beside it, what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting
from zerocore.layout.place import Place
from zerocore.tensor import functions
from zerocore.tensor.functions import Args, Function, Kwargs, is_foreach, is_in_place, name_of
from zerocore.tensor.placed import Placed, PlacedParameter, keep_place, local_of, outline_of


class NotLocal(Exception):
    """These arguments do not go together element by element; the text says why."""


def apply(func: Function, name: str, base: str, args: Args, kwargs: Kwargs) -> Any:
    """Calls ``func`` on local elements, with shards as results; NotLocal if nothing was done."""
    if is_foreach(name):
        return _apply_foreach(func, name, args, kwargs)
    if base in functions.VIEWS:
        return _view(func, args, kwargs)
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
        if result is new:  # a function in place returns what it was given
            return next(tensor for tensor in tensors if id(tensor) == old)
    return _wrapped(result, source)


def source_of(tensors: Iterable[Any]) -> Placed:
    """The one that gives results their place."""
    sources = [value for value in tensors if isinstance(value, Placed)]
    return next((value for value in sources if value.place.group is not None), sources[0])


def _wrapped(result: Any, source: Placed) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(item, source) for item in result)
    return keep_place(result, source)


def apply_operator(func: Function, args: Args, kwargs: Kwargs, changed: list[Any]) -> Any:
    """As :func:`apply`, for an operator that was declared to work element by element."""
    tensors = [value for value in changed if isinstance(value, Tensor)]
    for tensor in tensors:
        if not isinstance(tensor, Placed):
            raise NotLocal(
                f"; it also changes a plain tensor of shape {tuple(tensor.shape)} "
                "(torch.zeros_like of the parameter makes one that knows its place)"
            )
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)  # a kernel need not count, nor on all ranks
    if functions.returns_nothing(func) and not any(local_of(tensor).numel() for tensor in tensors):
        return None  # kernels need not expect tensors without elements
    has_lists = any(_is_list(value) for value in (*args, *kwargs.values()))
    run = _apply_foreach if has_lists else _apply_one
    return run(func, name_of(func), args, kwargs)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)


def _apply_foreach(func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    values = [*args, *kwargs.values()]
    if any(isinstance(value, Placed) for value in values):
        raise NotLocal("; it stands beside lists of tensors")
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
    """Plain local tensors for each of ``tensors``, or full ones if they change a full one.

    Shards that lie elsewhere than the one that is changed, or the first one, are moved to its
    place: all ranks must call. A plain tensor may have one element, the full shape (this
    rank's part of it is taken) or the shape of the shard. If the first one is changed, is plain
    and has the full shape, the shards are gathered: all ranks must call. Raises NotLocal.
    """
    sources = [tensor for tensor in tensors if isinstance(tensor, Placed)]
    sources.sort(key=lambda source: source.place.group is None)  # who knows the ranks comes first
    changed = out if out is not None else tensors[0] if in_place else None
    first = changed if isinstance(changed, Placed) else sources[0]
    place, local_shape = first.place, local_of(first).shape
    for other in sources:
        if not place.can_take(other.place):
            raise NotLocal(
                f"; '{other.fqn}'{other.place.origin} beside it lies elsewhere ({other!r})"
            )
    if changed is not None and not isinstance(changed, Placed):
        if _is_full(changed, place, local_shape):
            return [place.gather(local_of(t)) if isinstance(t, Placed) else t for t in tensors]
        if changed.shape != local_shape:
            raise NotLocal(f"; what is changed has shape {tuple(changed.shape)}")
    # A plain tensor that is changed in place is not broadcast.
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
    is_column = is_vector and place.global_shape[-1] == 1  # with which a vector makes a matrix
    if tensor.shape == local_shape and not is_row and not is_column:
        return tensor
    # A row of the full matrix and local elements may look alike, on this rank only.
    raise NotLocal(
        f"; a plain tensor of shape {tuple(tensor.shape)} stands beside it (torch.zeros_like of "
        "the parameter makes one that knows its place)"
    )


def _is_full(changed: Tensor, place: Place, local_shape: torch.Size) -> bool:
    """Whether a plain tensor that is changed is a full one; the same on all ranks. One rank may own
    all elements of a vector, so that its shape says nothing: the ranks tell each other."""
    is_full, is_local = changed.shape == place.global_shape, changed.shape == local_shape
    if place.group is None or len(place.global_shape) != 1:
        return is_full
    votes = torch.tensor(
        [is_full and not is_local, is_local and not is_full],
        dtype=torch.int64,
        device=changed.device,
    )
    with waiting(place.group, f"a change by '{place.fqn}'"):
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=place.group)
    full, local = votes.tolist()
    if full and local:
        raise NotLocal("; some ranks change a full tensor, others a local one")
    return bool(is_full and not local)


def _view(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The same local elements, which are a part of another shape."""
    source: Any = source_of((*args, *kwargs.values()))
    if isinstance(source, PlacedParameter):
        raise NotLocal("")  # the full one, as its elements have a place in what it is put into
    before = outline_of(source)
    outlines = {key: outline_of(value) for key, value in kwargs.items()}
    after = func(*(outline_of(value) for value in args), **outlines)
    is_same = after.stride() == before.stride() and after.shape == before.shape
    in_order = before.is_contiguous() and after.is_contiguous()
    if after.dtype != before.dtype or not (is_same or in_order):
        raise NotLocal("; its elements would come in another order")
    result = keep_place(source.detach(), source)
    result.place = replace(source.place, global_shape=after.shape)
    return result


def get_items(shard: Any, index: Any) -> Any:
    """``shard[:]``, and of a vector every slice: a view, in the same order; else NotLocal."""
    shape = shard.place.global_shape
    if isinstance(shard, PlacedParameter) or not isinstance(shard, Placed):
        raise NotLocal("")
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None) and len(shape) > 0):
        return keep_place(local_of(shard), shard)
    if not isinstance(index, slice) or len(shape) != 1 or (index.step or 1) < 1:
        raise NotLocal("")
    whole = range(shape[0])[index]
    # Of the slice, the elements from `first` to `last` lie here.
    first, last = (
        len(range(whole.start, min(whole.stop, bound), whole.step)) for bound in shard.shard_range
    )
    begin = whole[first] - shard.shard_range[0] if first < last else 0
    part = local_of(shard)[begin :: whole.step][: last - first]
    kind: Any = type(shard)
    result = part.as_subclass(kind.result_type)
    cut, items = shard.place.cut, (shape[0], whole.start, whole.stop, whole.step)
    result.place = replace(
        shard.place,
        global_shape=torch.Size([len(whole)]),
        shard_range=(first, last),
        strides=None,
        cut=None if cut is None else cut._replace(slices=(*cut.slices, items)),
    )
    return result


def draw(func: Function, name: str, shard: Placed, args: Any, kwargs: Any) -> Tensor:
    """This rank's part of what a random function gives for the full shape, plain.

    So that the same seed gives the same numbers as on a model that is not sharded.
    """
    local = local_of(shard)
    if any(isinstance(value, Placed) for value in (*args[1:], *kwargs.values())):
        raise NotLocal("; the parameters of the distribution are sharded, too")
    full = func(shard.place.like_full(local), *args[1:], **kwargs)
    part = shard.place.part_of(full)
    return local.copy_(part) if is_in_place(name) else part.clone()
