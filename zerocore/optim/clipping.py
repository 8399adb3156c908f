"""Clips gradients by their global norm, or finds the gradient that is not finite.

Note [One number]
A p-norm is a sum of powers. So one all-reduce of one float64 per process group that parameters are
cut over gives every rank the same norm. All ranks then agree whether it is finite. Only if it is
not, they find the parameter with one more all-reduce, in each group whose norm is not finite. If
every rank holds a gradient in full, each finds it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore._C import check_not_capturing
from zerocore.common import late
from zerocore.common.alarm import operation
from zerocore.common.patching import around
from zerocore.model.ranks import group_of
from zerocore.tensor import pending_host_updates
from zerocore.tensor.parameter import ShardedParameter, UnreducedGrad
from zerocore.tensor.reductions import reduce_norms
from zerocore.tensor.rows import RowShard, groups_of, local_part, shard_of
from zerocore.tensor.shown import shard_or_self

# Elements that are cast to float64 at a time, if no kernel sums them.
_PIECE_NUMEL = 1 << 20
Groups = tuple[dist.ProcessGroup, ...]


class NonFiniteGradError(RuntimeError):
    """The error of a gradient norm that is NaN or infinite: all ranks raise it, and change nothing.

    Attributes:
        norm: the norm.
        fqn: the first parameter whose gradient has a NaN or an infinite value; None if it is not a
            parameter of a sharded model, or if all values are finite and only the norm overflows.
        rank: the first rank, in the group of the model, whose part of that gradient has such a
            value; None if all ranks hold the same gradient.
    """

    def __init__(self, message: str, norm: float, fqn: str | None, rank: int | None) -> None:
        super().__init__(message)
        self.norm = norm
        self.fqn = fqn
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.norm, self.fqn, self.rank)


@operation("clip_grad_norm_")
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    across: Any = None,
) -> Tensor:
    """Scales gradients so that their global norm is at most ``max_norm``.

    The coefficient is ``min(1, max_norm / (norm + 1e-6))`` as in
    ``torch.nn.utils.clip_grad_norm_``. Ranks all-reduce one number per process group that
    parameters are cut over, and one for ``across``. Powers are summed in float64, whatever the
    gradients' dtypes. docs/behaviour.md shows how to skip a step whose gradients are not finite.

    Args:
        parameters: a model, or parameters in the same order on every rank: shards, DTensors and
            plain ones, in any mixture. A repeated one counts once.
        max_norm: upper bound of the norm, 0 or more.
        norm_type: p of the p-norm, positive or inf.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is scaled. On a
            GPU this waits for the norm. If False, gradients are scaled by the formula's result:
            zero for an infinite norm, NaN for a NaN.
        across: ranks with other parameters, a process group or 1-D DeviceMesh: for the stages of a
            pipeline, ``mesh["pp"]``. The norm then covers the parameters of all these ranks.

    Returns:
        The norm before scaling, a scalar equal on all ranks: float64 if a gradient is, otherwise
        float32.

    Raises:
        NonFiniteGradError: with ``error_if_nonfinite``. It names the first parameter, in the order
            of ``parameters``, whose gradient has a NaN or an infinite value, and the rank that
            holds these elements; averaging has mixed the ranks' losses.
        ValueError: ``norm_type`` or ``max_norm`` is out of range, or ``across`` has several
            dimensions.
        TypeError: ``across`` is neither a group nor a mesh.
    """
    p, bound = float(norm_type), float(max_norm)
    if not p > 0:
        raise ValueError(f"norm_type: expected p > 0 or inf, got {norm_type}")
    if not bound >= 0:
        raise ValueError(f"max_norm: expected 0 or more, got {max_norm}")
    parts = Parts(parameters)
    shards = (shard_of(param) for param in parts.params)
    for state in {shard.state_ref() for shard in shards if shard is not None} - {None}:
        check_not_capturing(state.device, "clip_grad_norm_ was called for a sharded model")
    pending_host_updates.finish()
    total = parts.norm(p)
    if across is not None:
        total = reduce_norms(total, p, group_of(across, "across"))
    if error_if_nonfinite and not total.isfinite():
        raise late.call("explain_norm", parts, total)
    grads = [grad for grad in parts.grads if grad is not None]
    _scale(grads, torch.clamp(bound / (total + 1e-6), max=1.0))
    is_double = any(grad.dtype.to_real() == torch.float64 for grad in grads)
    return total if is_double else total.float()


@around
def over_meshes(
    clip: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
) -> Tensor:
    """Wraps ``torch.nn.utils.clip_grad_norm_``, which cannot stack norms over several meshes, or of
    DTensors and plain tensors."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = [shard_or_self(param) for param in params]
    meshes = {getattr(shard, "device_mesh", None) for shard in shards if shard.grad is not None}
    if len(meshes) < 2 or not any(isinstance(shard_of(param), RowShard) for param in params):
        return clip(params, max_norm, *args, **kwargs)
    kwargs.pop("foreach", None)
    return clip_grad_norm_(params, max_norm, *args[:2], **kwargs)


class Parts:
    """Parameters, each once, by the groups of ranks that hold their other parts."""

    def __init__(self, parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        listed = [parameters] if isinstance(parameters, Tensor) else parameters
        shards = [shard_or_self(param) for param in listed]
        self.params = list({id(shard): shard for shard in shards}.values())
        self.grads = [None if p.grad is None else local_part(p.grad) for p in self.params]
        self.numbers: dict[Groups, list[int]] = {}  # key (): parameters that every rank has in full
        for number, param in enumerate(self.params):
            groups = () if self._is_own(param) else tuple(groups_of(param))
            self.numbers.setdefault(groups, []).append(number)
        self.norms: dict[Groups, Tensor] = {}  # over all ranks, once known

    @staticmethod
    def _is_own(param: Any) -> bool:
        """Whether the gradient is this rank's own sum, in full; some ranks may lack it."""
        if isinstance(grad := param.grad, UnreducedGrad):
            grad.check_readable()
            return True
        state = param.state_ref() if grad is None and isinstance(param, ShardedParameter) else None
        return state is not None and state.engine.shows_sums

    def norm(self, p: float) -> Tensor:
        """Returns the global norm, float64 on the device of the first parameter; collective."""
        device = self.params[0].device if self.params else None
        # Without a gradient, too: other ranks may have some, and would wait.
        for groups, numbers in self.numbers.items():
            grads = [grad for n in numbers if (grad := self.grads[n]) is not None]
            known = all(shard_of(self.params[number]) is not None for number in numbers)
            norm = _norm(grads, p, device, known)
            for group in groups:
                norm = reduce_norms(norm, p, group)
            self.norms[groups] = norm
        norms = list(self.norms.values()) or [torch.zeros((), dtype=torch.float64, device="cpu")]
        return torch.linalg.vector_norm(torch.stack(norms), p)


def _norm(
    grads: Sequence[Tensor], p: float, device: torch.device | None, are_shards: bool
) -> Tensor:
    """Returns the norm of this rank's elements, a float64 scalar, 0 if there are none.

    The kernel for p = 2 is faster than ``_foreach_norm``, and sums chunks in float64.
    In float32 on a CPU, ``_foreach_norm`` of 2^26 elements loses 0.2 % for p = 2, and half of the
    norm for p = 1. So elements are cast to float64 first.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grads = [grad.abs() if grad.is_complex() else grad for grad in grads]
        if p == 2.0 and grads and are_shards:
            out = torch.empty(2, dtype=torch.float64, device=device)
            torch.ops.zerocore.sum_of_squares(out, list(grads))
            return out[0].sqrt()
        pieces = [piece for grad in grads for piece in grad.flatten().split(_PIECE_NUMEL)]
        filled = [piece for piece in pieces if piece.numel() > 0]
        if not filled:
            return torch.zeros((), dtype=torch.float64, device=device)
        # A maximum needs no wider type.
        wide = None if math.isinf(p) else torch.float64
        norms = torch._foreach_norm(filled, p, wide)
        joined = torch.stack([norm.to(device, torch.float64) for norm in norms])
        return torch.linalg.vector_norm(joined, p)


def _scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), alike in by_kind.items():
            torch._foreach_mul_(alike, coefficient.to(device))
