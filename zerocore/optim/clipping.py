"""Clips gradients by their global norm, or says which gradient is not finite.

Note [One number]
A norm of parts is a sum of powers, so one all-reduce of one float64 gives every rank the same norm.
Whether it is finite is then the same on all ranks too, and only if it is not do they look for the
parameter, with one more all-reduce. That is decided by the norm of the parts that lie on
different ranks; a gradient that every rank holds whole was found by all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore.common.alarm import operation, waiting
from zerocore.tensor import updates
from zerocore.tensor.parameter import ShardedGrad, ShardedParameter
from zerocore.tensor.reductions import reduce_norms

_ops: Any = torch.ops.zerocore
# Elements that are widened to float64 at a time, where no kernel sums them.
_PIECE_NUMEL = 1 << 20


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
) -> Tensor:
    """Scales gradients so that their global norm is at most ``max_norm``.

    ``coefficient = min(1, max_norm / (norm + 1e-6))`` as in ``torch.nn.utils.clip_grad_norm_``;
    one all-reduce of one number. Powers are summed in float64, whatever the gradients' dtypes.

    To skip a step whose gradients are not finite::

        try:
            zerocore.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
            optimizer.step()
        except zerocore.NonFiniteGradError as error:  # on every rank alike
            print(f"step skipped: {error}")
        optimizer.zero_grad()

    Args:
        parameters: a model, or parameters of one sharded model in the same order on every rank
            (others may be among them). One that comes twice counts once.
        max_norm: upper bound of the norm, 0 or more.
        norm_type: p of the p-norm, positive or inf.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is scaled. On a
            GPU this waits for the norm. Otherwise gradients are scaled by what the formula gives:
            zero where the norm is infinite, NaN where it is NaN.

    Returns:
        The norm before scaling, a scalar equal on all ranks: float64 if a gradient is, otherwise
        float32.

    Raises:
        NonFiniteGradError: with ``error_if_nonfinite``; it names the first parameter, in the order
            of ``parameters``, whose gradient has a NaN or an infinite value, and the rank. The
            rank is the one that holds the elements: averaging has mixed the ranks' losses.
        ValueError: ``norm_type`` or ``max_norm`` out of range, or parameters of several groups.
    """
    p, bound = float(norm_type), float(max_norm)
    if not p > 0:
        raise ValueError(f"norm_type: expected p > 0 or inf, got {norm_type}")
    if not bound >= 0:
        raise ValueError(f"max_norm: expected 0 or more, got {max_norm}")
    updates.finish()
    parts = _Parts.of(parameters)
    total = parts.norm(p)
    if error_if_nonfinite and not total.isfinite():
        raise parts.explain(total)
    _scale(parts.grads(), torch.clamp(bound / (total + 1e-6), max=1.0))
    is_double = any(grad.dtype == torch.float64 for grad in parts.grads())
    return total if is_double else total.float()


@dataclass
class _Parts:
    """Parameters, each once, and their gradients by who holds what."""

    params: list[Tensor]
    group: dist.ProcessGroup | None = None
    split: list[Tensor] = field(default_factory=list)  # disjoint elements on each rank of group
    whole: list[Tensor] = field(default_factory=list)  # all elements on every rank
    foreign: list[Tensor] = field(default_factory=list)  # of parameters that are not sharded
    split_norm: Tensor | None = None  # that of the whole group, once known

    @classmethod
    def of(cls, parameters: nn.Module | Tensor | Iterable[Tensor]) -> _Parts:
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        parts = cls(list({id(param): param for param in given}.values()))
        for param in parts.params:
            parts._add(param)
        return parts

    def _add(self, param: Tensor) -> None:
        held = self.foreign
        if isinstance(param, ShardedParameter):
            group = param.place.group
            if group is not None and self.group not in (None, group):
                raise ValueError(
                    f"parameters: '{param.fqn}' is sharded over another group than those before "
                    "it; clip the models of each group in a call of its own"
                )
            self.group = self.group or group
            held = self.whole if group is None else self.split
        if param.grad is not None:
            held.append(param.grad)

    def grads(self) -> list[Tensor]:
        return self.split + self.whole + self.foreign

    def norm(self, p: float) -> Tensor:
        """The global norm, float64 on the device of the first parameter."""
        device = self.params[0].device if self.params else None
        norms = [_norm(grads, p, device) for grads in (self.whole, self.foreign)]
        # Also without any gradient here: the other ranks may have some, and would wait.
        if self.group is not None:
            self.split_norm = reduce_norms(_norm(self.split, p, device), p, self.group)
            norms.append(self.split_norm)
        return torch.linalg.vector_norm(torch.stack(norms), p)

    def explain(self, total: Tensor) -> NonFiniteGradError:
        """Finds the first bad gradient; all ranks come here together, see Note [One number]."""
        num_ranks, my_rank, count = 1, 0, len(self.params)
        position = next((i for i, param in enumerate(self.params) if _is_bad(param.grad)), count)
        if self.split_norm is not None and not self.split_norm.isfinite():
            assert self.group is not None
            num_ranks, my_rank = self.group.size(), self.group.rank()
            first = self.split_norm.new_tensor(position * num_ranks + my_rank, dtype=torch.int64)
            with waiting(self.group, "clip_grad_norm_"):
                dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
            position, my_rank = divmod(int(first), num_ranks)
        norm = total.item()
        if position == count:
            message = "every value is finite, only the norm is not; scale the loss down"
            return _error(norm, message, None, None)
        param = self.params[position]
        if not isinstance(param, ShardedParameter):
            message = f"the first bad gradient is that of parameters[{position}] (not sharded)"
            return _error(norm, message, None, None)
        rank = my_rank if param.place.group is not None else None
        where = "every rank" if rank is None else f"rank {rank}"
        message = f"the first bad gradient is that of '{param.fqn}', on {where}"
        return _error(norm, message, param.fqn, rank)


def _error(norm: float, message: str, fqn: str | None, rank: int | None) -> NonFiniteGradError:
    advice = "no gradient was changed; skip this step with optimizer.zero_grad()"
    text = f"the norm of the gradients is {norm}: {message}. Here {advice}"
    return NonFiniteGradError(text, norm, fqn, rank)


def _is_bad(grad: Tensor | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return grad is not None and not bool(grad.isfinite().all())


def _norm(grads: Sequence[Tensor], p: float, device: torch.device | None) -> Tensor:
    """The norm of these elements alone; a float64 scalar, 0 if there are none.

    For p = 2 by the kernel: it is faster than ``_foreach_norm`` and sums in float64 chunk by chunk.
    That one adds floats one after the other on a CPU: of 2^26 elements it loses 0.2 % for p = 2 and
    half of the sum for p = 1, which is therefore taken in float64.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if p == 2.0 and grads and all(isinstance(grad, ShardedGrad) for grad in grads):
            out = torch.empty(2, dtype=torch.float64, device=device)
            _ops.sum_of_squares(out, list(grads))
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
