"""Clips gradients by their global norm, or says which gradient is not finite.

Note [One number]
A norm of parts is a sum of powers, so one all-reduce of one float64 gives every rank the same norm,
for each group of ranks that parameters are cut over.
Whether it is finite is then the same on all ranks too, and only if it is not do they look for the
parameter, with one more all-reduce. That is decided by the norm of the parts that lie on
different ranks; a gradient that every rank holds whole was found by all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore._C import check_not_capturing
from zerocore.common.alarm import operation, waiting
from zerocore.common.patching import around
from zerocore.model.ranks import group_of
from zerocore.tensor import pending_host_updates
from zerocore.tensor.parameter import ShardedParameter, UnreducedGrad
from zerocore.tensor.reductions import reduce_norms
from zerocore.tensor.rows import RowShard, groups_of, local_part, shard_of
from zerocore.tensor.shown import shard_or_self

# Elements that are widened to float64 at a time, where no kernel sums them.
_PIECE_NUMEL = 1 << 20
Groups = tuple[dist.ProcessGroup, ...]


class NonFiniteGradError(RuntimeError):
    """The norm of the gradients is NaN or infinite; raised on every rank, nothing was changed.

    Attributes:
        norm: the norm.
        fqn: the first parameter whose gradient has a NaN or an infinite value; None if it is no
            parameter of a sharded model, or if all values are finite and only the norm overflows.
        rank: the first rank, in the group of the model, whose elements of that gradient have one;
            None if all ranks hold the same gradient.
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

    ``coefficient = min(1, max_norm / (norm + 1e-6))`` as in ``torch.nn.utils.clip_grad_norm_``;
    one all-reduce of one number for each group of ranks that parameters are cut over, and for
    ``across``. Powers are summed in float64, whatever the gradients' dtypes. docs/behaviour.md
    shows how to skip a step whose gradients are not finite.

    Args:
        parameters: a model, or parameters in the same order on every rank: shards, DTensors and
            plain ones, in any mixture. One that comes twice counts once.
        max_norm: upper bound of the norm, 0 or more.
        norm_type: p of the p-norm, positive or inf.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is scaled. On a
            GPU this waits for the norm. Otherwise gradients are scaled by what the formula gives:
            zero where the norm is infinite, NaN where it is NaN.
        across: ranks with other parameters, a process group or 1-D DeviceMesh: of the stages of a
            pipeline ``mesh["pp"]``. The norm is that of all their parameters, on all of them.

    Returns:
        The norm before scaling, a scalar equal on all ranks: float64 if a gradient is, otherwise
        float32.

    Raises:
        NonFiniteGradError: with ``error_if_nonfinite``; it names the first parameter, in the order
            of ``parameters``, whose gradient has a NaN or an infinite value, and the rank. The
            rank is the one that holds the elements: averaging has mixed the ranks' losses.
        ValueError: ``norm_type`` or ``max_norm`` out of range, or ``across`` of several dimensions.
        TypeError: ``across`` is neither a group nor a mesh.
    """
    p, bound = float(norm_type), float(max_norm)
    if not p > 0:
        raise ValueError(f"norm_type: expected p > 0 or inf, got {norm_type}")
    if not bound >= 0:
        raise ValueError(f"max_norm: expected 0 or more, got {max_norm}")
    parts = _Parts(parameters)
    shards = (shard_of(param) for param in parts.params)
    for state in {shard.state_ref() for shard in shards if shard is not None} - {None}:
        check_not_capturing(state.device, "clip_grad_norm_ was called for a sharded model")
    pending_host_updates.finish()
    total = parts.norm(p)
    if across is not None:
        total = reduce_norms(total, p, group_of(across, "across"))
    if error_if_nonfinite and not total.isfinite():
        raise parts.explain(total)
    grads = [grad for grad in parts.grads if grad is not None]
    _scale(grads, torch.clamp(bound / (total + 1e-6), max=1.0))
    is_double = any(grad.dtype == torch.float64 for grad in grads)
    return total if is_double else total.float()


@around
def over_meshes(
    clip: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, whose norms cannot be stacked if they are of several
    meshes, or of DTensors and of plain tensors."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = [shard_or_self(param) for param in params]
    meshes = {getattr(shard, "device_mesh", None) for shard in shards if shard.grad is not None}
    if len(meshes) < 2 or not any(isinstance(shard_of(param), RowShard) for param in params):
        return clip(params, max_norm, *args, **kwargs)
    kwargs.pop("foreach", None)
    return clip_grad_norm_(params, max_norm, *args[:2], **kwargs)


class _Parts:
    """Parameters, each once, and by the groups of ranks that have other parts of them."""

    def __init__(self, parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        shards = [shard_or_self(param) for param in given]
        self.params = list({id(shard): shard for shard in shards}.values())
        self.grads = [None if p.grad is None else local_part(p.grad) for p in self.params]
        self.numbers: dict[Groups, list[int]] = {}  # of none: all elements are on every rank
        for number, param in enumerate(self.params):
            groups = () if self._is_own(param) else tuple(groups_of(param))
            self.numbers.setdefault(groups, []).append(number)
        self.norms: dict[Groups, Tensor] = {}  # over all ranks, once known

    @staticmethod
    def _is_own(param: Any) -> bool:
        """Whether the gradient is this rank's alone, in full; a rank may have none of them."""
        if isinstance(grad := param.grad, UnreducedGrad):
            grad.check_readable()
            return True
        state = param.state_ref() if grad is None and isinstance(param, ShardedParameter) else None
        return state is not None and state.engine.shows_sums

    def norm(self, p: float) -> Tensor:
        """The global norm, float64 on the device of the first parameter."""
        device = self.params[0].device if self.params else None
        # Also without any gradient here: the other ranks may have some, and would wait.
        for groups, numbers in self.numbers.items():
            grads = [grad for n in numbers if (grad := self.grads[n]) is not None]
            known = all(shard_of(self.params[number]) is not None for number in numbers)
            norm = _norm(grads, p, device, known)
            for group in groups:
                norm = reduce_norms(norm, p, group)
            self.norms[groups] = norm
        norms = list(self.norms.values()) or [torch.zeros((), dtype=torch.float64, device="cpu")]
        return torch.linalg.vector_norm(torch.stack(norms), p)

    def explain(self, total: Tensor) -> NonFiniteGradError:
        """Finds the first bad gradient; all ranks come here together, see Note [One number]."""
        found = [self._first_bad(g) for g, norm in self.norms.items() if not norm.isfinite()]
        number, rank = min(found, default=(len(self.params), 0))
        norm = total.item()
        if number == len(self.params):
            message = "every value is finite, only the norm is not; scale the loss down"
            if all(norm.isfinite() for norm in self.norms.values()):
                message = "the bad gradient is on another rank of across="
            return _error(norm, message, None, None)
        param = self.params[number]
        shard, is_split = shard_of(param), len(tuple(groups_of(param))) > 0
        name = f"parameters[{number}]" if shard is None else f"'{shard.fqn}'"
        where = f", on rank {rank}" if is_split else ", on every rank"
        where = " (not sharded)" if shard is None and not is_split else where
        message = f"the first bad gradient is that of {name}{where}"
        fqn = None if shard is None else shard.fqn
        return _error(norm, message, fqn, rank if is_split else None)

    def _first_bad(self, groups: Groups) -> tuple[int, int]:
        """The number of the first parameter, and the first rank in the groups that has a part."""
        numbers, count = self.numbers[groups], len(self.params)
        number = next((n for n in numbers if _is_bad(self.grads[n])), count)
        num_ranks, rank = 1, 0
        for group in groups:
            num_ranks, rank = num_ranks * group.size(), rank * group.size() + group.rank()
        first = self.norms[groups].new_tensor(number * num_ranks + rank, dtype=torch.int64)
        for group in groups:
            with waiting(group, "clip_grad_norm_"):
                dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        return divmod(int(first), num_ranks)


def _error(norm: float, message: str, fqn: str | None, rank: int | None) -> NonFiniteGradError:
    advice = "no gradient was changed; skip this step with optimizer.zero_grad()"
    text = f"the norm of the gradients is {norm}: {message}. Here {advice}"
    return NonFiniteGradError(text, norm, fqn, rank)


def _is_bad(grad: Tensor | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return grad is not None and not bool(grad.isfinite().all())


def _norm(
    grads: Sequence[Tensor], p: float, device: torch.device | None, are_shards: bool
) -> Tensor:
    """The norm of these elements alone; a float64 scalar, 0 if there are none.

    For p = 2 by the kernel: it is faster than ``_foreach_norm`` and sums in float64 chunk by chunk.
    That one adds floats one after the other on a CPU: of 2^26 elements it loses 0.2 % for p = 2 and
    half of the sum for p = 1, which is therefore taken in float64.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if p == 2.0 and grads and are_shards:
            out = torch.empty(2, dtype=torch.float64, device=device)
            torch.ops.zerocore.sum_of_squares(out, list(grads))
            return out[0].sqrt()
        pieces = [piece for grad in grads for piece in grad.flatten().split(_PIECE_NUMEL)]
        filled = [piece for piece in pieces if piece.numel() > 0]
        if not filled:
            return torch.zeros((), dtype=torch.float64, device=device)
        # The largest element needs no wider type.
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
