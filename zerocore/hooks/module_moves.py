"""Keeps shards in their memory when a sharded model is moved or cast (``.to()``, ``.float()``).

``nn.Module`` replaces its parameters' memory by the move's result. A shard lies in a flat buffer
that the engine gathers from: a move may change its values, but never its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.common.patching import around
from zerocore.model.casting import as_bytes
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import held_shard

_Move = Callable[[Tensor], Tensor]
_TO_EMPTY = [code for code in nn.Module.to_empty.__code__.co_consts if isinstance(code, CodeType)]


class _Checked:
    """A move that has passed ``_check`` for every dtype and device of the module's shards."""

    def __init__(self, move: _Move) -> None:
        self._move = move
        # to_empty() promises no values, so a parameter that has memory may keep it.
        self.is_empty = getattr(move, "__code__", None) in _TO_EMPTY

    def __call__(self, tensor: Tensor) -> Tensor:
        result = self._move(tensor)
        return tensor.to(result.device) if self.is_empty and not tensor.is_meta else result


@around
def leaves_shards_in_place(
    move_all: Any, self: nn.Module, fn: _Move, recurse: bool = True
) -> nn.Module:
    """Wraps ``nn.Module._apply``, which all moves and casts call, and leaves shards in place."""
    if not isinstance(fn, _Checked):
        shards = {p: held_shard(p) for p in self.parameters(recurse)}
        fqns = {param: shard.fqn for param, shard in shards.items() if shard is not None}
        if not fqns:
            return move_all(self, fn, recurse)
        _check(self, fqns, fn)
        fn = _Checked(fn)
    params = self._parameters
    sharded = {key: p for key, p in params.items() if held_shard(p) is not None}
    try:
        params.update(dict.fromkeys(sharded))  # torch does not move None
        move_all(self, fn, recurse)
    finally:
        params.update(sharded)
    if not fn.is_empty:
        for param in sharded.values():
            _take_values(param, fn)
    return self


def _check(module: nn.Module, fqns: dict[Any, str], move: _Move) -> None:
    """Rejects a move that changes the dtype or the device of a shard: tries it on one element."""
    tried: set[tuple[torch.dtype, torch.device]] = set()
    for param, fqn in fqns.items():
        kind = (param.dtype, param.device)
        if kind in tried:
            continue
        tried.add(kind)
        result = move(torch.zeros(1, dtype=param.dtype, device=param.device))
        # A CPU index means nothing; tensors on other devices always have an index.
        moves = result.device != param.device and not (result.is_cpu and param.is_cpu)
        if result.dtype != param.dtype or moves:
            raise TypeError(
                f"cannot change a sharded {type(module).__name__}, parameter '{fqn}', from "
                f"{param.dtype} on {param.device} to {result.dtype} on {result.device}; move or "
                "cast it before zerocore.shard"
            )


@torch.no_grad()
def _take_values(param: Any, move: _Move) -> None:
    """Copies the result of ``move`` into the parameter's memory if its values differ."""
    with torch._C.DisableTorchFunctionSubclass():
        place = param.detach().as_subclass(Tensor)
        value = place.clone() if place.numel() > 0 else place.new_zeros(1)
        version = value._version
        result = move(value)
        if result.shape != value.shape:
            raise TypeError(
                f"the move changes the shape of parameter '{held_shard(param).fqn}' of a sharded "
                f"model from {tuple(value.shape)} to {tuple(result.shape)}; change it before "
                "zerocore.shard"
            )
        # All ranks must decide alike; the values of a shard differ from rank to rank.
        is_untouched = result is value and value._version == version
        if is_untouched or not isinstance(param, ShardedParameter):
            is_untouched = place.numel() == 0 or torch.equal(as_bytes(result), as_bytes(place))
        if not is_untouched:
            place.copy_(result[: place.numel()] if place.dim() == 1 else result)
