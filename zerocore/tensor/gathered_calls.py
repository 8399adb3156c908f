"""Calls functions that need all elements of gradients, states and other shards.

The ranks gather the full values at each call. A function that changes a shard changes its full
value, and each rank copies its part back.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.common.alarm import operation
from zerocore.tensor.full_copies import with_own_part
from zerocore.tensor.functions import Args, Function, Kwargs, is_elementwise, name_of
from zerocore.tensor.implicit_unshard import Gathered, call_with_full, run_full, version_of, without
from zerocore.tensor.placed import Placed, PlacedParameter, full_value_of, leaves, local_of
from zerocore.tensor.refused import stepping

_log = logging.getLogger("zerocore")
_told: set[str] = set()  # functions that a warning has named
_LIBRARIES = frozenset({"zerocore", "torch"})


def call_gathered(
    func: Function, args: Args, kwargs: Kwargs, changed: list[Any], reason: str = ""
) -> Any:
    """Calls ``func`` with full values instead of shards, and copies changes back; collective.

    ``reason`` says why ``func`` cannot work on local elements, for the warning.
    """
    shards = {id(v): v for v in leaves((args, kwargs)) if isinstance(v, Placed)}
    params = [shard for shard in shards.values() if isinstance(shard, PlacedParameter)]
    writes = any(isinstance(value, Placed) for value in changed)
    if params and not writes:
        return call_with_full(func, args, kwargs, params)
    sets = name_of(func) == "__setitem__" and len(shards) == 1  # reads no other element
    if sets:
        fulls = {key: with_own_part(shard) for key, shard in shards.items()}
    else:
        _check_no_local(name_of(func), shards, (args, kwargs))
        fulls = _gather(name_of(func), shards, reason)
    versions = {key: version_of(full) for key, full in fulls.items()}
    values = tree_map_only(Placed, lambda shard: fulls[id(shard)], (args, kwargs))
    output = run_full(func, *values)
    for key, shard in shards.items():
        _check_shape(name_of(func), shard, fulls[key])
    written = {id(shard) for shard in changed if isinstance(shard, Placed)}
    for key, shard in shards.items():
        if key in written or version_of(fulls[key]) != versions[key]:
            local_of(shard).copy_(shard.place.part_of(fulls[key]))
    own = {id(full): shards[key] for key, full in fulls.items()}
    if isinstance(output, Tensor) and id(output) in own:
        return own[id(output)]
    copied = [(s, fulls[key]) for key, s in shards.items() if not s.place.is_whole]
    return without([_described(*pair) for pair in copied], output)


def _check_no_local(name: str, shards: dict[int, Placed], values: Any) -> None:
    """Rejects a library's operator that would get a plain tensor of a shard's local size beside its
    full value: it may not check sizes."""
    shard = next(iter(shards.values()))
    local, numel = local_of(shard).numel(), shard.global_shape.numel()
    plain = (v for v in leaves(values) if isinstance(v, Tensor) and not isinstance(v, Placed))
    alike = [tensor for tensor in plain if tensor.dtype == shard.dtype]  # others may be packed
    if "::" in name and any(local == tensor.numel() not in (1, numel) for tensor in alike):
        raise TypeError(
            f"{name}() gets the full value of {shard.what} '{shard.fqn}', of shape "
            f"{tuple(shard.global_shape)}, and beside it a plain tensor of this rank's {local} "
            "elements. Make the other tensor with torch.zeros_like of the parameter"
        )


def _gather(name: str, shards: dict[int, Placed], reason: str) -> dict[int, Tensor]:
    if all(shard.place.is_whole for shard in shards.values()):
        return {key: full_value_of(shard) for key, shard in shards.items()}
    first = next(iter(shards.values()))
    call, line = f"{name}() of {first.what} '{first.fqn}'", line_of_program()
    _warn(name, call + line, [*shards.values()], reason)
    with operation(call, line):  # a rank that calls alone reads it in the alarm's error
        return {key: full_value_of(shard) for key, shard in shards.items()}


def _check_shape(name: str, shard: Placed, full: Tensor) -> None:
    if full.shape != shard.global_shape:
        raise RuntimeError(
            f"{name}() changed the shape of {shard.what} '{shard.fqn}' from "
            f"{tuple(shard.global_shape)} to {tuple(full.shape)}, and a shard keeps its shape. Use "
            "a function that returns a new tensor"
        )


def _described(shard: Placed, full: Tensor) -> Gathered:
    return Gathered(shard, shard.what, shard.fqn, full, version_of(full))


def _warn(name: str, call: str, shards: list[Placed], reason: str) -> None:
    """Says once for each function, on the first rank, what its calls gather, and where."""
    if name in _told or (dist.is_initialized() and dist.get_rank() > 0):
        return
    _told.add(name)
    nbytes = sum(shard.global_shape.numel() * shard.dtype.itemsize for shard in shards)
    text = "%s needs all elements%s. The ranks gather them at each call, here %d bytes%s"
    _log.warning(text, call, reason, nbytes, _advice(name))


def line_of_program() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def _advice(name: str) -> str:
    """Returns what to do instead if an optimizer or an operator calls."""
    advice, kind = "", stepping()
    if kind is not None:
        advice = (
            f". To gather less in each step of {kind}, build it as zerocore.matrices.owned({kind}, "
            "params, ...), which gives each parameter to one rank"
        )
    if "::" in name and not is_elementwise(name):
        advice += (
            ". If the operator is element-wise, declare it, and nothing is gathered: "
            f"zerocore.register_elementwise('{name}')"
        )
    return advice
