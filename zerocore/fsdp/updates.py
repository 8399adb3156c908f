"""Tells engines which rows an optimizer has updated: DTensors do not count all changes."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerocore._C import UpdatedUnit
from zerocore.fsdp.root import Root, live_roots

_Updated = list[tuple[ref[Root], list[UpdatedUnit]]]
# With the number of parameters and the engines that there were when the updates were found.
_updates: WeakKeyDictionary[Optimizer, tuple[Any, _Updated]] = WeakKeyDictionary()


@cache
def watch_updates() -> None:
    """From now on the steps of all optimizers are looked at."""
    register_optimizer_step_post_hook(_after_step)


@_disable_dynamo  # a compiled step goes on with it behind its graphs
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engines = [root.engine for root in live_roots() if root.engine is not None]
    if not engines:
        return
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    key = (num_params, {id(engine) for engine in engines})
    known = _updates.get(optimizer)
    if known is None or known[0] != key:
        known = _updates[optimizer] = (key, _find(optimizer))
    for root_ref, units in known[1]:
        root = root_ref()
        if root is not None and root.engine is not None:
            root.engine.end_update(units, False)


def _find(optimizer: Optimizer) -> _Updated:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = []
    for root in live_roots():
        positions: dict[int, list[int]] = defaultdict(list)
        for _, group in root.groups:
            for position, param in enumerate(group.params):
                if id(param.shard) in held:
                    positions[group.unit].append(position)
        if root.engine is not None and positions:
            units = [UpdatedUnit(unit, each) for unit, each in positions.items()]
            found.append((ref(root), units))
    return found
