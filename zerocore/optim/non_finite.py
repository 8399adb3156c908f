"""Finds the gradient that is not finite, once the norm of all has shown that there is one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting
from zerocore.optim.clipping import Groups, NonFiniteGradError, Parts
from zerocore.tensor.rows import groups_of, shard_of


def explain_norm(parts: Parts, total: Tensor) -> NonFiniteGradError:
    """Returns the error that names the first non-finite gradient; collective, see Note [One
    number] in ``clipping``."""
    first = [_first_bad(parts, g) for g, norm in parts.norms.items() if not norm.isfinite()]
    number, rank = min(first, default=(len(parts.params), 0))
    norm = total.item()
    if number == len(parts.params):
        message = "every value is finite, only the norm is not; scale the loss down"
        if all(norm.isfinite() for norm in parts.norms.values()):
            message = "the non-finite gradient is on another rank of across="
        return _error(norm, message, None, None)
    param = parts.params[number]
    shard, is_split = shard_of(param), len(tuple(groups_of(param))) > 0
    name = f"parameters[{number}]" if shard is None else f"'{shard.fqn}'"
    where = f", on rank {rank}" if is_split else ", on every rank"
    where = " (not sharded)" if shard is None and not is_split else where
    message = f"the first non-finite gradient belongs to {name}{where}"
    return _error(norm, message, None if shard is None else shard.fqn, rank if is_split else None)


def _first_bad(parts: Parts, groups: Groups) -> tuple[int, int]:
    """Returns the index of the first such parameter, and the first rank with such elements."""
    numbers, count = parts.numbers[groups], len(parts.params)
    number = next((n for n in numbers if _is_bad(parts.grads[n])), count)
    num_ranks, rank = 1, 0
    for group in groups:
        num_ranks, rank = num_ranks * group.size(), rank * group.size() + group.rank()
    first = parts.norms[groups].new_tensor(number * num_ranks + rank, dtype=torch.int64)
    for group in groups:
        with waiting(group, "clip_grad_norm_"):
            dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    return divmod(int(first), num_ranks)


def _error(norm: float, message: str, fqn: str | None, rank: int | None) -> NonFiniteGradError:
    advice = "No gradient was changed; skip this step with optimizer.zero_grad()"
    text = f"the norm of the gradients is {norm}: {message}. {advice}"
    return NonFiniteGradError(text, norm, fqn, rank)


def _is_bad(grad: Tensor | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return grad is not None and not bool(grad.isfinite().all())
