"""The public functions: shard a model, and work with a sharded one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zerocore.install import hook_into_torch
from zerocore.model.extensions import check_engine_gathers
from zerocore.model.materialize import InitFn
from zerocore.model.ranks import find_ranks, note_names
from zerocore.model.state import Unit, ready_state_of, state_of
from zerocore.model.units import UnitChoice
from zerocore.options.config import Communication, ShardConfig
from zerocore.options.offload import Offload
from zerocore.options.precision import MixedPrecision
from zerocore.sharding.collect import shard_model

_Model = TypeVar("_Model", bound=nn.Module)


def shard(
    model: _Model,
    *,
    stage: int = 3,
    group: Any = None,
    groups: Mapping[str, Any] | None = None,
    units: Sequence[UnitChoice] | None = None,
    communication: Communication | None = None,
    mixed_precision: MixedPrecision | None = None,
    offload: Offload | None = None,
    memory_budget: str | int | None = None,
    device: torch.device | None = None,
    init_fn: InitFn | None = None,
    sync_params: bool = True,
) -> _Model:
    """Shards the training state of ``model`` over data-parallel ranks, in place.

    Afterwards ``model.parameters()`` are this rank's shards (:class:`ShardedParameter`, of the full
    shape); the objects stay, also in optimizers and lists. During forward and backward they are the
    full parameters. Gradients are averaged over the ranks unless ``communication`` has a
    ``gradient_divide_factor``.

    Args:
        model: any module; on the meta device it is initialised unit by unit.
        stage: 0 replicates all (all-reduce), 1 shards optimizer states, 2 gradients too, 3
            parameters too.
        group: process group or 1-D DeviceMesh; None takes the default group, made under torchrun
            if there is none. Without torch.distributed the world has one rank. A 2-D DeviceMesh is
            hybrid sharding: its first dimension are replicas, over the second the state is sharded;
            gradients are reduce-scattered in it and then all-reduced over the replicas, which may
            share the optimizer's states (``Communication(replicas_share="optimizer")``).
        groups: ranks of parameters that not all ranks of ``group`` share, by a pattern of their
            names: a :class:`ParameterMesh`, or the mesh of one.
        units: what is gathered together, see :func:`zerocore.model.units.choose_units`.
        communication: when and how ranks communicate, such as ``Communication(prefetch=2)``; see
            :class:`Communication`.
        mixed_precision: layers compute in a narrow dtype over main weights in a wide one; see
            :class:`MixedPrecision`.
        offload: what leaves the device's memory for the host's; see :class:`Offload`.
        memory_budget: bytes, or text such as ``"70GiB"``: refuse at once if parameters, gradients,
            the states of Adam and the bucket pool would take more. Activations are not counted.
        device: where parameters on the meta device go.
        init_fn: initialises one module in place, for the meta device; its
            ``reset_parameters()`` by default.
        sync_params: rank 0's values win.

    Returns:
        ``model`` itself.

    Raises:
        ValueError, TypeError: a mistake, named; on every rank, before anything could hang.
        MemoryError: ``offload=`` wants more of the host's memory than this rank can have; a
            RuntimeError that says so on the others.
    """

    def make_config() -> ShardConfig:
        options = Communication() if communication is None else communication
        return ShardConfig(stage, options, sync_params, mixed_precision, offload)

    hook_into_torch()  # first: groups that are made below get names on which all ranks agree
    ranks = find_ranks(group, model, device)
    state = shard_model(
        model,
        make_config,
        ranks,
        units=units,
        device=device,
        init_fn=init_fn,
        memory_budget=memory_budget,
        groups=groups,
    )
    note_names(group, divides=state.config.communication.gradient_divide_factor is not None)
    return model


@contextmanager
def unsharded(module: nn.Module, write_back: bool = False) -> Iterator[None]:
    """Full parameters of ``module`` (a sharded model or a part of it) in their usual places.

    All ranks must enter; the model may be one of :mod:`zerocore.fsdp`. With ``write_back`` changes
    are kept, also those before an exception; make the same change on every rank, each keeps its own
    part of it. May be nested.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: parameters were changed without ``write_back``, or this process was forked
            from the one that sharded the model.
    """
    state = ready_state_of(module)
    units = state.units_of(module)
    check_engine_gathers(units, "unsharded")
    indices = [unit.index for unit in units]
    if write_back:
        state.finish_reads()
    _check_write_back(units, write_back)
    with _disable_current_modes():  # a FakeTensorMode around this has the values of a trace alone
        state.encode()
        state.engine.hold_unsharded(indices)
    state.shown_full.update(indices)
    lost: list[str] = []
    try:
        yield
    finally:
        state.shown_full.subtract(indices)
        with _disable_current_modes():
            lost += state.engine.release_unsharded(indices, write_back)
    if lost:
        raise RuntimeError(
            f"parameter '{lost[0]}' was changed inside of unsharded(write_back=False); pass "
            "write_back=True to keep changes"
        )


def _check_write_back(units: list[Unit], write_back: bool) -> None:
    for each in (each for unit in units for each in unit.extensions if write_back):
        raise NotImplementedError(
            f"unsharded(write_back=True): parameter '{each.fqn}' gathers itself, and what modules "
            "see of it is not written back. Change its shard (p.data = full value) instead"
        )


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes ``module.<name>(...)`` gather the module's parameters, as calling it does.

    Raises:
        ValueError: not sharded, or no such method.
    """
    state = ready_state_of(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method '{name}'")
    state.kind.wrap_method(module, name)


def reset(model: nn.Module) -> None:
    """Drops what a failed step left: gathered parameters, graphs, gradients not reduced yet.

    The next forward does this by itself after a forward or backward that raised. Call it to free
    the memory at once. Gradients that were accumulating when a backward failed are not
    meaningful: call ``optimizer.zero_grad()``.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state_of(model).engine.reset()
