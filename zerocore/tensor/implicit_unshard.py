"""Unshards parameters that a program reads outside a module's call, as a call of the unit would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.tensor.functions import Args, Function, Kwargs, is_in_place, name_of
from zerocore.tensor.placed import Placed, PlacedParameter, leaves, local_of
from zerocore.tensor.received import received_by


class FullCopy(Tensor):
    """A copy of a parameter in place of a view. A change of it would be lost, so changes raise."""

    fqn: str

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = name_of(func)
            changed = args[:1] if is_in_place(name) else received_by(func, args, kwargs or {})
            changed = leaves(changed)
            if of := next((t.fqn for t in changed if isinstance(t, FullCopy)), None):
                raise TypeError(
                    f"{name}() would change a copy of the sharded parameter '{of}', not the "
                    "parameter. Use `with zerocore.unsharded(model, write_back=True)` around the "
                    "change"
                )
            if any(isinstance(value, Placed) for value in leaves((args, kwargs))):
                return NotImplemented  # the shards' rules handle it together with a shard
            result = func(*args, **(kwargs or {}))
            sources = [value for value in leaves(args) if isinstance(value, FullCopy)]
            return tree_map_only(
                Tensor,
                lambda t: as_copy(t, sources[0].fqn) if _shares_memory(t, sources) else t,
                result,
            )

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone().__reduce_ex__(proto)


def as_copy(tensor: Tensor, fqn: str) -> FullCopy:
    """Marks ``tensor`` as a copy of the parameter of that name, or of a part of it."""
    copy = tensor.as_subclass(FullCopy)
    copy.fqn = fqn
    return copy


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
    shards = [(v.what, v.fqn) if _is_copied(v) else None for v in leaves((args, kwargs))]
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
        output = func(*full[0], **full[1])
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


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


# The kind and name of a shard for errors, its full value, and the version of the full value.
_Full = tuple[tuple[str, str], Tensor, int]


def _full_values(shards: Sequence[tuple[str, str] | None], full: Any) -> list[_Full]:
    pairs = zip(shards, leaves(full), strict=True)
    return [(shard, value, version_of(value)) for shard, value in pairs if shard is not None]


def _is_copied(value: Any) -> bool:
    return isinstance(value, PlacedParameter) or (
        isinstance(value, Placed) and not value.place.is_whole
    )


def check_unchanged(func: Function, fulls: list[_Full]) -> None:
    """Rejects a function that has written to full values (TypeError)."""
    for (what, fqn), full, version in fulls:
        if version_of(full) != version:
            raise TypeError(
                f"{name_of(func)}() changed a full copy of {what} '{fqn}', so the change would be "
                "lost. If the function is element-wise, declare it with "
                "zerocore.register_elementwise. Otherwise call it under "
                "`with zerocore.unsharded(model, write_back=True)`"
            )


def _with_full(shard: Placed) -> Tensor:
    # Other shards among the arguments are needed in full, too.
    if isinstance(shard, PlacedParameter):
        return shard.shown()
    if _is_copied(shard):
        return shard.place.gather(local_of(shard))
    outline = shard.place.outline(shard.dtype)
    return local_of(shard).as_strided(outline.shape, outline.stride())


def _shares_memory(tensor: Tensor, sources: Iterable[Any]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(storage == source.untyped_storage()._cdata for source in sources)


def without(fulls: list[_Full], output: Any) -> Any:
    """Replaces tensors in the output that share memory with full values by copies."""
    if type(output).__name__ == "ndarray":
        return output.copy()
    plain = {Tensor, *(type(full) for _, full, _ in fulls)}

    def copied(tensor: Tensor) -> Tensor:
        of = next((shard for shard, full, _ in fulls if _shares_memory(tensor, [full])), None)
        if of is None:
            return tensor
        if type(tensor) in plain:
            return as_copy(tensor.clone(), of[1])
        copy = (tensor.detach() if tensor.is_leaf else tensor).clone().as_subclass(type(tensor))
        return copy.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, copied, output)
