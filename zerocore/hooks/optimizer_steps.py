"""Watches optimizer steps: tells the engine which units an optimizer updates.

A torch optimizer needs a parameter and its gradient on the same device. If shards are on the host
and gradients on a device, ``grad`` is the host's copy during a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerocore._C import Engine, UpdatedUnit, show_grad
from zerocore.common.eager import eager
from zerocore.hooks.optimizer_rules import prepare
from zerocore.hooks.optimizer_states import drop_unloaded, params_of
from zerocore.model.state import ShardState
from zerocore.tensor import pending_host_updates
from zerocore.tensor.earlier import give_rows
from zerocore.tensor.functions import Args, Kwargs
from zerocore.tensor.parameter import ShardedGrad, ShardedParameter, UnreducedGrad
from zerocore.tensor.rows import shard_of

_log = logging.getLogger("zerocore")


# Gradients replaced during a step: the parameter, the device's gradient, the host's.
_Shown = list[tuple[ShardedParameter, Tensor, Tensor]]
_shown: WeakKeyDictionary[Optimizer, _Shown] = WeakKeyDictionary()


def with_host_gradients(
    optimizer: Optimizer, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shows the host's gradients to a step, and again after its closure has run a backward."""
    _show_host_gradients(optimizer)
    return _with_closure(args, kwargs, lambda closure: _wrapped(closure, optimizer))


def _with_closure(args: Args, kwargs: Kwargs, wrap: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    optimizer, *rest = args
    if rest and rest[0] is not None:
        return (optimizer, wrap(rest[0]), *rest[1:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return args, kwargs


def _hiding_after(closure: Callable[[], Any], engines: list[Engine]) -> Callable[[], Any]:
    @wraps(closure)
    def run() -> Any:
        result = closure()
        for engine in engines:  # forwards in the closure have shown full parameters
            engine.set_hiding(True)
        return result

    return run


def show_device_gradients(optimizer: Optimizer) -> None:
    """Puts the device's gradients back, unless the program has set another ``grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        for param, grad, host in _shown.pop(optimizer, []):
            if param.grad is host:
                show_grad(param, grad)


def _show_host_gradients(optimizer: Optimizer) -> None:
    pending_host_updates.finish()
    shown = _shown.setdefault(optimizer, [])
    with torch._C.DisableTorchFunctionSubclass():
        for param in params_of(optimizer):
            grad = param.grad
            if grad is None or not isinstance(param, ShardedParameter) or not param.on_host:
                continue
            if grad.device != param.device:
                state: Any = param.state_ref()
                host = state.engine.arrived_gradient(param.unit, param.position)
                host = ShardedGrad.make(host, param.place, param.state_ref)
                show_grad(param, host)
                shown.append((param, grad, host))


def _wrapped(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    @wraps(closure)
    def run() -> Any:
        show_device_gradients(optimizer)
        result = closure()
        _show_host_gradients(optimizer)
        return result

    return run


class ShardOptimizer(Optimizer):
    """The base of zerocore's optimizers: its flags say what their steps do beyond an update."""

    casts_model_weights = False  # also writes the weights that layers compute with
    updates_on_host = False  # updates states on the host, from gradients that the engine sends
    moves_matrices = False  # sends whole matrices to the ranks that own them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


def _known(optimizer: Optimizer) -> ShardOptimizer | type[ShardOptimizer]:
    return optimizer if isinstance(optimizer, ShardOptimizer) else ShardOptimizer


@dataclass(frozen=True)
class _Updated:
    """The parameters of one model that an optimizer updates."""

    state_ref: Callable[[], ShardState | None]
    units: list[int]
    parts: list[UpdatedUnit]


# ``_find_updates`` by optimizer, valid for a number of its parameters and of sharded models.
_updates: WeakKeyDictionary[Optimizer, tuple[tuple[int, int], list[_Updated]]]
_updates = WeakKeyDictionary()


def optimizers_of(state: ShardState) -> list[Optimizer]:
    """Returns the optimizers that have begun an update of parameters of ``state``."""
    return [
        optimizer
        for optimizer, (_, updates) in _updates.items()
        if any(updated.state_ref() is state for updated in updates)
    ]


def _find_updates(optimizer: Optimizer) -> list[_Updated]:
    params = params_of(optimizer)
    positions: dict[Callable[[], ShardState | None], dict[int, list[int]]] = {}
    for param in params:
        if (shard := shard_of(param)) is not None:
            units = positions.setdefault(shard.state_ref, {})
            units.setdefault(shard.unit, []).append(shard.position)
    _warn_of_unsharded(params, list(positions))
    return [
        _Updated(state_ref, list(units), _parts(state_ref(), units))
        for state_ref, units in positions.items()
    ]


def _parts(state: ShardState | None, units: dict[int, list[int]]) -> list[UpdatedUnit]:
    parts = []
    for unit, positions in units.items():
        params = [] if state is None else state.units[unit].params
        trained = [param for param in params if param.shard.requires_grad]
        is_part = len(set(positions)) < len(trained)
        parts.append(UpdatedUnit(unit, positions if is_part else None))
    return parts


def _warn_of_unsharded(params: list[Any], states: list[Callable[[], ShardState | None]]) -> None:
    """Warns of a head or adapter outside the sharded model: each rank would train its own."""
    live = [state for state in (ref() for ref in states) if state is not None]
    shared = any(state.world_size > 1 and state.kind.has_all for state in live)
    outside = [p for p in params if p.requires_grad and shard_of(p) is None]
    if shared and outside:
        _log.warning(
            "the optimizer holds %d parameters that are in no sharded model (the first one of "
            "shape %s): their gradients are not averaged over the ranks. Shard the outermost "
            "module that holds them",
            len(outside),
            list(outside[0].shape),
        )


@eager  # a compiled step of DTensors calls it between its graphs
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Runs before each step (a torch hook); returns the arguments for the step."""
    drop_unloaded(optimizer)
    known = _updates.get(optimizer)
    key = (sum(len(group["params"]) for group in optimizer.param_groups), ShardState.num_made)
    if known is None or known[0] != key:
        give_rows(optimizer)
        prepare(optimizer)
        _updates[optimizer] = (key, _find_updates(optimizer))
    updates = _updates[optimizer][1]
    pairs = [(updated, state) for updated in updates if (state := updated.state_ref())]
    casts = _known(optimizer).casts_model_weights
    reads_on_host = False
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))  # its backward may reduce
    engines = [state.engine for _, state in pairs]
    for updated, state in pairs:
        _check_offload(optimizer, state)
        if not has_closure:
            _check_reduced(optimizer, state)
        reads_on_host = reads_on_host or _reads_on_host(optimizer, state)
        state.finish_reads()
        state.engine.begin_update(updated.units, casts)
    if reads_on_host:
        args, kwargs = with_host_gradients(optimizer, args, kwargs)
    if engines:
        args, kwargs = _with_closure(args, kwargs, lambda closure: _hiding_after(closure, engines))
    return args, kwargs


def _reads_on_host(optimizer: Optimizer, state: ShardState) -> bool:
    """Whether the step itself must read the host's copies of the gradients."""
    if state.config.offload is None:
        return False
    has_copies = state.device.type != "cpu" or state.engine.lands_gradients
    return has_copies and not (_known(optimizer).updates_on_host and state.config.leaves("states"))


def _check_reduced(optimizer: Optimizer, state: ShardState) -> None:
    """Rejects a step that would update a shard from one rank's unreduced gradient."""
    if not state.engine.shows_sums:
        return
    shares_work = _known(optimizer).moves_matrices and state.world_size > 1
    for param in params_of(optimizer):
        shard, grad = shard_of(param), param.grad
        is_own = isinstance(grad, UnreducedGrad) or (shares_work and grad is not None)
        if is_own and shard is not None and shard.state_ref() is state:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the gradient of '{shard.fqn}' was not averaged: "
                "its last backward ran under no_sync. Run the last backward before a step outside "
                "of no_sync, or drop the gradients: optimizer.zero_grad(). "
                "zerocore.shard(model, stage=0) steps with each rank's own gradient, as "
                "DistributedDataParallel"
            )


def _check_offload(optimizer: Optimizer, state: ShardState) -> None:
    offload, name = state.config.offload, type(optimizer).__name__
    if offload is None or _known(optimizer).updates_on_host:
        return
    if state.config.place_of("states") == "disk":
        raise ValueError(
            f"{name} keeps its states in memory; for a model with "
            "offload=zerocore.Offload(states='disk') use zerocore.optim.AdamW"
        )
    if state.device.type != "cpu" and not state.config.leaves("states"):
        raise ValueError(
            f"{name} updates parameters on {state.device}, but offload=zerocore.Offload(states="
            "'device', gradients='cpu') keeps their gradients on the host; use states='cpu', or "
            "zerocore.optim.AdamW"
        )


@eager
def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    show_device_gradients(optimizer)
    casts = _known(optimizer).casts_model_weights
    # Version counters show in-place updates, not updates that an optimizer makes through `.data`.
    for updated in _updates[optimizer][1]:
        if (state := updated.state_ref()) is not None:
            if state.engine.end_update(updated.parts, casts):
                pending_host_updates.begin_gathers(updated.state_ref)
            state.meters.note_update()
