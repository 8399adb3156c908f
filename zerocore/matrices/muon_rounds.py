"""Runs a step of Muon in rounds: an exchange overlaps the previous round's Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocore.matrices.exchange import Arrival, RoundExchange
from zerocore.matrices.ownership import Matrix, Round
from zerocore.matrices.parameters import Whole
from zerocore.optim.kernel_calls import Factors

WIRE = torch.bfloat16  # lossless, as Newton-Schulz begins and ends in it

States = Mapping[Any, Mapping[str, Tensor]]  # states by parameter
Pair = tuple[Whole, dict[str, Any]]

# Shorter sides of matrices that a CPU batches. A batch of larger matrices is 2 to 4 times slower
# than one after the other; in a batch of smaller ones, sums round differently.
_BATCHED_ON_CPU = range(24, 129)
ADJUSTMENTS = ("original", "match_rms_adamw")


def orthogonalise(batch: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Orthogonalises each matrix of ``(count, rows, columns)``, of any floating dtype, by the
    operations of ``torch.optim.Muon``: it divides the matrix by its norm (at least ``eps``), then
    applies the polynomial of degree 5 with the three coefficients ``steps`` times. Returns
    bfloat16, of the same shape."""
    if batch.device.type == "cpu" and min(batch.shape[1:]) not in _BATCHED_ON_CPU:
        return torch.stack([_iterate(matrix, coefficients, steps, eps) for matrix in batch])
    return _iterate(batch, coefficients, steps, eps)


def _iterate(matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16, copy=True)
    x = x.mT if is_tall else x
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def adjusted_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Returns the factor on a matrix's learning rate, as in ``torch.optim.Muon``."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError for an option of a group of matrices that is out of range."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor lr must have one element, got shape {tuple(lr.shape)}")
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be 0 or more, got {group[name]}")
    if group["adjust_lr_fn"] not in (None, *ADJUSTMENTS):
        raise ValueError(
            f"adjust_lr_fn must be None or one of {ADJUSTMENTS}, got {group['adjust_lr_fn']!r}"
        )
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be three, got {group['ns_coefficients']}")
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps must be 0 to 99, got {group['ns_steps']}")


class MuonRounds:
    """The rounds of all steps in which the same parameters have gradients."""

    def __init__(self, rounds: Sequence[RoundExchange], pairs: Sequence[Pair]) -> None:
        self.rounds, self._pairs = rounds, pairs
        self._updates: dict[int, Tensor] = {}  # updates of parameters with matrices still to send

    def run(self, states: States, factors: Factors | None, overlapped: Callable[[], None]) -> None:
        """Runs one step; calls ``overlapped`` while the first exchange is in flight.

        The host does not wait to know whether the step is skipped. A skipped step exchanges
        updates like any other, but keeps momenta and weights.
        """
        used = {matrix.param for exchange in self.rounds for matrix in exchange.step.matrices}
        locals_ = {index: self._pairs[index][0].elements() for index in sorted(used)}
        returning: Callable[[], None] | None = None
        arriving = self._send(0, states, factors)
        overlapped()
        for number, exchange in enumerate(self.rounds):
            following = self._send(number + 1, states, factors)
            back = exchange.to_shards(self._orthogonalised(exchange.step, arriving()))
            if returning is not None:
                returning()
            returning = self._applying(exchange.step, back, locals_, factors)
            arriving = following
        if returning is not None:
            returning()
        for index, local in locals_.items():
            whole = self._pairs[index][0]
            model_weight = whole.shard.model_weight
            if model_weight is not None and not whole.shard.on_host:
                whole.elements(model_weight).copy_(local)

    def _send(self, number: int, states: States, factors: Factors | None) -> Arrival:
        if number == len(self.rounds):
            self._updates = {}
            return list
        step = self.rounds[number].step
        needed = dict.fromkeys(matrix.param for matrix in step.matrices)
        fresh = [param for param in needed if param not in self._updates]
        known = self._updates | dict(zip(fresh, self._momenta(fresh, states, factors), strict=True))
        self._updates = {param: known[param] for param in needed}
        parts = [
            self._updates[matrix.param][self._local(step, index, matrix)]
            for index, matrix in enumerate(step.matrices)
        ]
        return self.rounds[number].to_owners(parts)

    def _momenta(
        self, params: Sequence[int], states: States, factors: Factors | None
    ) -> list[Tensor]:
        """Updates momenta, and returns the updates to orthogonalise. Each operation is one kernel
        launch for a group."""
        by_group: dict[Hashable, list[int]] = {}
        for index in params:
            whole, group = self._pairs[index]
            kind = states[whole.param]["momentum_buffer"].dtype
            by_group.setdefault((id(group), kind), []).append(index)
        updates: dict[int, Tensor] = {}
        for indices in by_group.values():
            wholes, group = [self._pairs[index][0] for index in indices], self._pairs[indices[0]][1]
            buffers = [pair.elements(states[pair.param]["momentum_buffer"]) for pair in wholes]
            grads = [pair.elements(pair.param.grad) for pair in wholes]
            grads = [grad.to(old.dtype) for grad, old in zip(grads, buffers, strict=True)]
            if factors is not None:
                grads = _scaled(grads, buffers, factors)
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            directions = buffers
            if group["nesterov"]:
                directions = list(torch._foreach_lerp(grads, buffers, group["momentum"]))
            sent = [torch.empty_like(update, dtype=WIRE) for update in directions]
            torch._foreach_copy_(sent, directions)
            updates.update(zip(indices, sent, strict=True))
        return [updates[index] for index in params]

    def _local(self, step: Round, index: int, matrix: Matrix) -> slice:
        """Returns the slice of this rank's shard that holds its elements of a matrix."""
        begin, end = step.own_parts[index]
        offset = matrix.begin - step.cuts[index].owned(step.shard)[0]
        return slice(offset + begin, offset + end) if begin < end else slice(0, 0)

    def _orthogonalised(self, step: Round, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalises this rank's own matrices, flattened, with a batch for each shape."""
        batches: dict[Hashable, list[int]] = {}
        for position, index in enumerate(step.mine):
            matrix = step.matrices[index]
            group = self._pairs[matrix.param][1]
            batches.setdefault((matrix.shape, id(group)), []).append(position)
        results = list(arrived)
        for positions in batches.values():
            matrix = step.matrices[step.mine[positions[0]]]
            group = self._pairs[matrix.param][1]
            batch = torch.stack([arrived[position].view(matrix.shape) for position in positions])
            options = (group["ns_coefficients"], group["ns_steps"], group["eps"])
            for position, result in zip(positions, orthogonalise(batch, *options), strict=True):
                results[position] = result.reshape(-1)
        return results

    def _applying(
        self, step: Round, back: Arrival, locals_: Mapping[int, Tensor], factors: Factors | None
    ) -> Callable[[], None]:
        def apply() -> None:
            for index, (matrix, update) in enumerate(zip(step.matrices, back(), strict=True)):
                group = self._pairs[matrix.param][1]
                lr = float(group["lr"])
                # Rows and columns of the model; a transposed matrix has them swapped in memory.
                columns = self._pairs[matrix.param][0].place.global_shape[-1]
                rows = matrix.numel // columns
                ratio = adjusted_ratio(group["adjust_lr_fn"], rows, columns)
                part = locals_[matrix.param][self._local(step, index, matrix)]
                new = part if factors is None else part.clone()
                new.mul_(1 - lr * group["weight_decay"])
                new.add_(update.to(part.device), alpha=-lr * ratio)  # weights may be on the host
                if factors is not None:
                    torch.where(factors.skips(part.device), part, new, out=part)

        return apply


def _scaled(grads: Sequence[Tensor], momenta: Sequence[Tensor], factors: Factors) -> list[Tensor]:
    """Returns scaled gradients; in a skipped step the momenta, which then do not change."""
    assert factors.grad_scale is not None
    device = grads[0].device
    skips, factor = factors.skips(device), factors.grad_scale.to(device)
    return [
        torch.where(skips, momentum, grad * factor)
        for grad, momentum in zip(grads, momenta, strict=True)
    ]
