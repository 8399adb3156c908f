"""Copies in place of views of full values: they behave as views of a plain parameter do.

A shard has no full value in memory that a view could share. So ``weight[0]`` is a copy. If a
function changes the copy, the shard gets the new values. If the shard has changed since, the copy
gets the shard's values before a function reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.tensor.functions import Args, Function, Kwargs, changed_by, name_of
from zerocore.tensor.held import held_full, param_of
from zerocore.tensor.implicit_unshard import (
    FullCopy,
    View,
    call_with_full,
    in_call,
    shares_memory,
    version_of,
)
from zerocore.tensor.noted_writes import note_full
from zerocore.tensor.placed import (
    Placed,
    PlacedParameter,
    full_value_of,
    leaves,
    local_of,
    shard_in,
)
from zerocore.tensor.received import received_by
from zerocore.tensor.rules import needs_values


def call_on_copies(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a torch function on :class:`FullCopy` tensors; collective if a shard has changed."""
    with torch._C.DisableTorchFunctionSubclass():
        name = name_of(func)
        copies = [value for value in leaves((args, kwargs)) if isinstance(value, FullCopy)]
        changed = [v for v in leaves(changed_by(func, args, kwargs)) if isinstance(v, FullCopy)]
        for copy in changed:
            _check_writable(name, copy)
        for copy in leaves(received_by(func, args, kwargs)):
            if isinstance(copy, FullCopy):
                _refuse(name, copy.of)
        if any(isinstance(value, Placed) for value in leaves((args, kwargs))):
            if not changed:
                return NotImplemented  # the shards' rules handle it together with a shard
            args, kwargs = tree_map_only(Placed, full_value_of, (args, kwargs))
        if needs_values(func, args):
            for copy in copies:
                _refresh(copy)
        before = [_versions(copy) for copy in copies]
        result = func(*args, **kwargs)
        written = [c for c, old in zip(copies, before, strict=True) if _versions(c) != old]
        for copy in {id(copy.of): copy for copy in written}.values():
            _write(name, copy)
        return tree_map_only(Tensor, lambda tensor: _as_copy(tensor, copies), result)


def version_of_shard(shard: Any) -> int:
    """Returns a number that changes with the shard's values."""
    param: Any = param_of(shard)
    param = shard_in(shard) if param is None else param
    state = None if param is None else param.state_ref()
    if state is None:
        return version_of(shard)
    version: int = state.engine.param_version(param.unit, param.position)
    return version


def with_own_part(shard: Placed) -> Tensor:
    """Returns a full tensor of which only this rank's elements have their values."""
    local = local_of(shard)
    full = shard.place.like_full(local)
    start, end = shard.shard_range
    full.as_strided((full.numel(),), (1,))[start:end] = local
    return full


def _versions(copy: FullCopy) -> tuple[int, int]:
    return version_of(copy), version_of(copy.of.copy)  # a result of `data` has a version of its own


def _as_copy(tensor: Tensor, copies: list[FullCopy]) -> Tensor:
    source = next((copy for copy in copies if shares_memory(tensor, [copy])), None)
    return tensor if source is None else FullCopy.on(tensor, source.of)


def _check_writable(name: str, copy: FullCopy) -> None:
    of = copy.of
    if torch.is_grad_enabled() and copy.requires_grad:
        raise RuntimeError(
            f"{name}() changes a view of {of.what} '{of.fqn}', a leaf that requires grad, in place."
            " Call it under torch.no_grad()"
        )
    is_same = isinstance(of.shard, Placed) and of.copy.dtype == of.dtype == local_of(of.shard).dtype
    if not is_same or (isinstance(of.shard, PlacedParameter) and in_call(of.shard)):
        _refuse(name, of)


def _refuse(name: str, of: View) -> None:
    raise RuntimeError(  # a TypeError of `row += 1` would make Python compute `row = row + 1`
        f"{name}() would change a copy of the sharded {of.what} '{of.fqn}', not the parameter. Use "
        "`with zerocore.unsharded(model, write_back=True)` around the change"
    )


def _refresh(copy: FullCopy) -> None:
    of, version = copy.of, version_of_shard(copy.of.shard)
    if version == of.version[0]:
        return
    if copy.requires_grad:
        raise RuntimeError(
            f"a view of {of.what} '{of.fqn}' that autograd has recorded is read after a change of "
            "it: take the view again, after the change"
        )
    with torch.no_grad():
        of.copy.copy_(_full_of(of.shard).as_strided(*of.geometry))
    of.version[0] = version


def _full_of(shard: Any) -> Tensor:
    """Returns the full value, at offset 0 of its memory."""
    if isinstance(shard, PlacedParameter):
        full: Tensor = call_with_full(torch.clone, (shard,), {}, [shard])
        return full
    if not isinstance(shard, Placed):
        return shard.detach().clone()  # a parameter in a call
    held = held_full(shard)
    return shard.place.gather(local_of(shard)) if held is None else held.clone()


def _write(name: str, copy: FullCopy) -> None:
    """Copies the new values of ``copy`` to this rank's elements of the shard."""
    of = copy.of
    _check_writable(name, copy)
    with torch.no_grad():
        full = with_own_part(of.shard)
        full.as_strided(*of.geometry).copy_(of.copy)
        local_of(of.shard).copy_(of.shard.place.part_of(full))
    if (param := param_of(of.shard)) is not None:
        note_full(param, of.copy)
    of.version[0] = version_of_shard(of.shard)
