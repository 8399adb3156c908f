"""The public functions that shard a model and work with a sharded one."""

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
from zerocore.model.ranks import find_ranks
from zerocore.model.state import ready_state_of, state_of
from zerocore.model.units import Unit, UnitChoice
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

    Afterwards ``model.parameters()`` are this rank's shards (:class:`ShardedParameter`, with the
    full shape). They are the same objects as before, so optimizers and lists stay valid. During
    forward and backward they are the full parameters. At stage 0, without main weights and offload,
    they are full, plain tensors at all times. Gradients are averaged over the ranks, unless
    ``communication`` has a ``gradient_divide_factor``.

    Args:
        model: any module; on the meta device it is initialised unit by unit.
        stage: 0 replicates all (all-reduce); 1 shards optimizer states, 2 also gradients, 3 also
            parameters.
        group: process group or 1-D DeviceMesh. None takes the default group, and initialises it
            under torchrun; without torch.distributed, the world has one rank. A 2-D DeviceMesh is
            hybrid sharding: replicas along the first dimension, shards along the second. Gradients
            are reduce-scattered over the second, then all-reduced over the replicas, which may
            share the optimizer's states (``Communication(replicas_share="optimizer")``).
        groups: ranks of parameters that not all ranks of ``group`` share, by patterns of their
            names: a :class:`ParameterMesh`, or only its mesh.
        units: modules that are gathered together, see :func:`zerocore.model.units.choose_units`.
        communication: when and how ranks communicate, such as ``Communication(prefetch=2)``; see
            :class:`Communication`.
        mixed_precision: narrow dtypes for layers, over wide main weights; see
            :class:`MixedPrecision`.
        offload: parts of the state that are offloaded to the host or a disk; see :class:`Offload`.
        memory_budget: bytes, or text such as ``"70GiB"``: raise at once if parameters, gradients,
            Adam's states and the bucket pool would take more. Activations do not count.
        device: the device for parameters on the meta device.
        init_fn: initialises one module in place, for the meta device; by default its
            ``reset_parameters()``.
        sync_params: broadcast rank 0's values to all ranks.

    Returns:
        ``model`` itself.

    Raises:
        ValueError, TypeError: an invalid model or option, by name; on every rank, before ranks
            could hang.
        MemoryError: ``offload=`` needs more of the host's memory than this rank can have;
            RuntimeError with its text on other ranks.
    """

    def make_config() -> ShardConfig:
        options = Communication() if communication is None else communication
        return ShardConfig(stage, options, sync_params, mixed_precision, offload)

    hook_into_torch()  # first: all ranks then agree on the names of new groups
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
    if getattr(group, "mesh_dim_names", None):
        from zerocore.model.mesh_names import note_names  # late: few programs name dimensions

        note_names(group, divides=state.config.communication.gradient_divide_factor is not None)
    return model


@contextmanager
def unsharded(module: nn.Module, write_back: bool = False) -> Iterator[None]:
    """Unshards ``module`` (a sharded model or a part of it) within the block.

    All ranks must enter the block; ``module`` may be a model of :mod:`zerocore.fsdp`.
    ``write_back`` keeps changes, even if an exception follows. Make the same change on every rank:
    each rank keeps its own part of the change. Blocks may be nested.

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
    with _disable_current_modes():  # within a FakeTensorMode, a gather needs real values
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
            f"parameter '{lost[0]}' was changed inside unsharded(write_back=False); pass "
            "write_back=True to keep changes"
        )


def _check_write_back(units: list[Unit], write_back: bool) -> None:
    for extension in (ext for unit in units for ext in unit.extensions if write_back):
        raise NotImplementedError(
            f"unsharded(write_back=True): parameter '{extension.fqn}' gathers itself, and its full "
            "value is not written back. Change its shard (p.data = full value) instead"
        )


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes ``module.<name>(...)`` unshard the module's parameters, as calling the module does.

    Raises:
        ValueError: the module is not sharded, or has no such method.
    """
    state = ready_state_of(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method '{name}'")
    state.kind.wrap_method(module, name)


def reset(model: nn.Module) -> None:
    """Drops the remains of a failed step: gathered parameters, graphs, unreduced gradients.

    After a forward or backward that raised, the next forward drops them, too. Call ``reset`` to
    free the memory at once. If a backward failed during accumulation, the gradients are not
    meaningful: call ``optimizer.zero_grad()``.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state_of(model).engine.reset()
