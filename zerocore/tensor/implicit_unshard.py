"""Unshards parameters that a program reads outside a module's call, as a call of the unit would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.common import late
from zerocore.tensor.functions import Args, Function, Kwargs, name_of
from zerocore.tensor.placed import Placed, PlacedParameter, full_value_of, leaves


class Gathered(NamedTuple):
    """A full value of a shard that a function has got."""

    shard: Any
    what: str  # the kind and name of the shard, for errors: within a call, it may be full itself
    fqn: str
    full: Tensor
    version: int  # of ``full``, before the function


class View(NamedTuple):
    """The part of a shard's full value that a :class:`FullCopy` is a copy of. Views of a copy have
    the same object."""

    shard: Any
    what: str
    fqn: str
    dtype: torch.dtype  # of the full value
    geometry: tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset in the full value
    copy: Tensor  # plain, on the memory of the copy
    version: list[int]  # the shard's, when ``copy`` had its values


class FullCopy(Tensor):
    """A copy in place of a view of a shard's full value. A change of it changes the shard, too,
    and it follows changes of the shard: see ``full_copies``."""

    of: View

    @staticmethod
    def make(view: Tensor, gathered: Gathered) -> FullCopy:
        """Copies ``view``, which shares memory with the full value."""
        full, copy = gathered.full, _cloned(view)
        offset = int(view.storage_offset() - full.storage_offset())
        of = View(
            *gathered[:3],
            full.dtype,
            (view.shape, view.stride(), offset),
            copy.detach(),
            [late.call("version_of_shard", gathered.shard)],
        )
        return FullCopy.on(copy, of)

    @staticmethod
    def on(tensor: Tensor, of: View) -> FullCopy:
        """Marks ``tensor`` as one on the memory of the copy."""
        copy = tensor.as_subclass(FullCopy)
        copy.of = of
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return late.call("call_on_copies", func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.clone().__reduce_ex__(proto)


def _cloned(view: Tensor) -> Tensor:
    """Returns a copy with the strides of ``view``."""
    copy = view.clone()
    if copy.stride() == view.stride() or copy.requires_grad or 0 in view.stride():
        return copy
    span = 1 + sum((n - 1) * by for n, by in zip(view.shape, view.stride(), strict=True))
    return view.new_empty(max(0, span)).as_strided(view.shape, view.stride()).copy_(view)


def in_call(param: PlacedParameter) -> bool:
    """Whether a forward of the parameter's model is running."""
    state = param.state_ref()
    return state is not None and state.engine.in_call


def is_recorded(values: Any) -> bool:
    """Whether autograd would record a function of these values."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in leaves(values)
    )


def call_with_full(
    func: Function, args: Args, kwargs: Kwargs, params: Sequence[PlacedParameter]
) -> Any:
    """Calls ``func`` with full parameters instead of sharded ones, as a call of their units would.

    All ranks must call it. Within a forward, the running module's call adopts the units.
    """
    units = {(id(param.state_ref()), param.unit): param for param in params}
    entered: list[tuple[Any, int]] = []
    is_inside = any(in_call(param) for param in params)
    shards = [(v, v.what, v.fqn) if _is_copied(v) else None for v in leaves((args, kwargs))]
    try:
        for (_, unit), param in sorted(units.items(), key=lambda item: item[0][1]):
            state = param.state_ref()
            if state is None:
                raise RuntimeError(f"parameter '{param.fqn}': the model was freed; keep it alive")
            if state.engine.in_call:
                state.engine.adopt(unit)
            else:
                state.encode()
                state.engine.enter(unit)
                entered.append((state.engine, unit))
        full = tree_map_only(Placed, _with_full, (args, kwargs))
        fulls = [] if is_inside else _full_values(shards, full)
        output = run_full(func, *full)
        if fulls:
            check_unchanged(func, fulls)
            with torch._C.DisableTorchFunctionSubclass():
                output = without(fulls, output)
    except BaseException:
        for engine, unit in reversed(entered):
            engine.exit(unit, None)
        raise
    for engine, unit in reversed(entered):
        engine.exit(unit, output, keep=True)  # parameters of one unit are often read in a row
    return output


def run_full(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls ``func`` with full values. The offset of ``as_strided`` counts from the start of a
    storage, and a full value may lie in a storage with others."""
    if name_of(func) in ("as_strided", "as_strided_"):
        names = ("size", "stride", "storage_offset")
        options = dict(zip(names, args[1:], strict=False)) | kwargs
        if options.get("storage_offset") is not None:
            args, kwargs = args[:1], options
            kwargs["storage_offset"] += next(leaves((args, kwargs))).storage_offset()
    return func(*args, **kwargs)


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _full_values(shards: Sequence[tuple[Any, str, str] | None], full: Any) -> list[Gathered]:
    pairs = zip(shards, leaves(full), strict=True)
    return [Gathered(*shard, value, version_of(value)) for shard, value in pairs if shard]


def _is_copied(value: Any) -> bool:
    return isinstance(value, PlacedParameter) or (
        isinstance(value, Placed) and not value.place.is_whole
    )


def check_unchanged(func: Function, fulls: list[Gathered]) -> None:
    """Rejects a function that has written to full values (TypeError)."""
    for gathered in fulls:
        if version_of(gathered.full) != gathered.version:
            raise TypeError(
                f"{name_of(func)}() changed a full copy of {gathered.what} '{gathered.fqn}', so "
                "the change would be "
                "lost. If the function is element-wise, declare it with "
                "zerocore.register_elementwise. Otherwise call it under "
                "`with zerocore.unsharded(model, write_back=True)`"
            )


def _with_full(shard: Placed) -> Tensor:
    # Other shards among the arguments are needed in full, too.
    if isinstance(shard, PlacedParameter):
        return shard.shown()
    return full_value_of(shard)


def shares_memory(tensor: Tensor, sources: Iterable[Any]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(storage == source.untyped_storage()._cdata for source in sources)


def without(fulls: list[Gathered], output: Any) -> Any:
    """Replaces tensors in the output that share memory with full values by copies."""
    if type(output).__name__ == "ndarray":
        return output.copy()
    plain = {Tensor, *(type(gathered.full) for gathered in fulls)}

    def copied(tensor: Tensor) -> Tensor:
        of = next((each for each in fulls if shares_memory(tensor, [each.full])), None)
        if of is None:
            return tensor
        if type(tensor) in plain:
            return FullCopy.make(tensor, of)
        copy = (tensor.detach() if tensor.is_leaf else tensor).clone().as_subclass(type(tensor))
        return copy.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, copied, output)
