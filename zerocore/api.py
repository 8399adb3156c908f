"""The public functions: shard a model, and work with a sharded one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.materialize import InitFn
from zerocore.module import wrap_method
from zerocore.precision import MixedPrecision
from zerocore.sharding import find_group, shard_model
from zerocore.state import state_of
from zerocore.tensor import ShardedGrad, local_norms, reduce_norms
from zerocore.wrapping import UnitChoice


def shard(
    model: nn.Module,
    *,
    stage: int = 3,
    group: Any = None,
    units: Sequence[UnitChoice] | None = None,
    prefetch: int = 1,
    accumulate: str = "sharded",
    device: torch.device | None = None,
    init_fn: InitFn | None = None,
    sync_params: bool = True,
    find_unused_parameters: bool = False,
    optimizer: Optimizer | None = None,
    memory_budget: str | int | None = None,
    mixed_precision: MixedPrecision | None = None,
) -> nn.Module:
    """Shards the training state of ``model`` over data-parallel ranks, in place.

    Afterwards ``model.parameters()`` are this rank's shards (1-D :class:`ShardedParameter`); build
    the optimizer from them. During forward and backward the modules see full parameters.
    Gradients are averaged over the ranks.

    Args:
        model: any module; on the meta device it is initialised unit by unit.
        stage: 0 replicates all (all-reduce), 1 shards optimizer states, 2 gradients too, 3
            parameters too.
        group: process group or 1-D DeviceMesh; None takes the default group, made under torchrun
            if there is none. Without torch.distributed the world has one rank.
        units: what is gathered together, see :func:`zerocore.wrapping.choose_units`.
        prefetch: units gathered ahead of the one that computes.
        accumulate: ``"sharded"`` or ``"full"``, see :class:`ShardConfig`.
        device: where parameters on the meta device go.
        init_fn: initialises one module in place, for the meta device; its
            ``reset_parameters()`` by default.
        sync_params: rank 0's values win.
        find_unused_parameters: see :class:`ShardConfig`.
        optimizer: only to be told early that it must be built after ``shard``.
        memory_budget: bytes, or text such as ``"70GiB"``: refuse at once if parameters, gradients,
            the states of Adam and the bucket pool would take more. Activations are not counted.
        mixed_precision: layers compute in a narrow dtype over main weights in a wide one; see
            :class:`MixedPrecision`.

    Returns:
        ``model`` itself.

    Raises:
        ValueError, TypeError: a mistake, named; on every rank, before anything could hang.
    """
    options = {
        "stage": stage,
        "prefetch": prefetch,
        "accumulate": accumulate,
        "sync_params": sync_params,
        "find_unused_parameters": find_unused_parameters,
        "mixed_precision": mixed_precision,
    }
    process_group = find_group(group, model)
    shard_model(model, options, process_group, units, device, init_fn, optimizer, memory_budget)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communicating, as far as the stage holds full gradients.

    Stages 0 and 1, and 2 and 3 with ``accumulate="full"``: gradients are reduced in the first
    backward outside. Stages 2 and 3 with ``accumulate="sharded"`` reduce in every backward.
    """
    engine = state_of(model).engine
    before = engine.sync
    engine.sync = False
    try:
        yield
    finally:
        engine.sync = before


@contextmanager
def unsharded(module: nn.Module, write_back: bool = False) -> Iterator[None]:
    """Full parameters of ``module`` (a sharded model or a part of it) in their usual places.

    All ranks must enter. With ``write_back`` changes are kept; make the same change on every
    rank, each keeps its own part of it.

    Raises:
        RuntimeError: parameters were changed without ``write_back``.
    """
    state = state_of(module)
    units = state.units_of(module)
    indices = [unit.index for unit in units]
    params = [param for unit in units for param in unit.params]
    state.engine.pin(indices)
    versions = [param.full._version for param in params]
    changed = None
    try:
        yield
        changed = next(
            (p.fqn for p, v in zip(params, versions, strict=True) if p.full._version != v), None
        )
    finally:
        state.engine.unpin(indices, write_back)
    if changed is not None and not write_back:
        raise RuntimeError(
            f"parameter '{changed}' was changed inside of unsharded(write_back=False); pass "
            "write_back=True to keep changes"
        )


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes ``module.<name>(...)`` gather the module's parameters, as calling it does.

    Raises:
        ValueError: not sharded, or no such method.
    """
    state_of(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method '{name}'")
    wrap_method(module, name)


def reset(model: nn.Module) -> None:
    """Drops what a failed step left: gathered parameters, graphs, gradients not reduced yet.

    The next forward does this by itself after a forward or backward that raised. Call it to free
    the memory at once. Gradients that were accumulating when a backward failed are not
    meaningful: call ``optimizer.zero_grad()``.
    """
    state_of(model).engine.reset()


def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales gradients so that their global norm is at most ``max_norm``.

    ``coefficient = min(1, max_norm / (norm + 1e-6))`` as in ``torch.nn.utils.clip_grad_norm_``;
    one all-reduce of one number.

    Args:
        parameters: a model, or parameters of one sharded model (others may be among them).
        max_norm: upper bound of the norm.
        norm_type: p of the p-norm, positive or inf.

    Returns:
        The norm before scaling, a scalar equal on all ranks.
    """
    params = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros(())
    split = [g for g in grads if isinstance(g, ShardedGrad) and g.place.group is not None]
    whole = [g for g in grads if not (isinstance(g, ShardedGrad) and g.place.group is not None)]
    norms = []
    if split:
        group = split[0].place.group
        norms.append(reduce_norms(_local_norm(split, norm_type), norm_type, group))
    if whole:
        norms.append(_local_norm(whole, norm_type))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch._C.DisableTorchFunctionSubclass():
        for grad in grads:
            grad.mul_(coefficient.to(grad.dtype))
    return total


def _local_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        norms = local_norms(grads, norm_type)
        # Half-precision norms are combined in float32, double ones in double.
        widest = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        return torch.linalg.vector_norm(torch.stack([n.to(widest) for n in norms]), norm_type)
