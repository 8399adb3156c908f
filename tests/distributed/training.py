"""Trains a case of the zoo twice in the same way: in one process, and on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.values import own_of, range_of
from tests.zoo import CASES
from tests.zoo_case import Case

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

STEPS = 3  # the first learns the order, the second uses it, the third finds nothing new
MICRO_BATCHES = (2, 2, 1)  # samples; the last one is smaller


@dataclass(frozen=True)
class Trained:
    """losses[rank][step] of the ranks this process played, and the full state at the end."""

    losses: list[list[float]]
    state: dict[str, Tensor]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW that does not blow up rounding.

    Adam divides a gradient by its own size. Where a gradient is zero but for rounding (a key bias
    under softmax), a usual eps of 1e-8 turns noise of 1e-9 into steps; 1e-5 leaves it noise. The
    weight decay shows whether a parameter that nobody used is left alone.
    """
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5, weight_decay=0.1)


def train_reference(
    case: Case, world_size: int, make_optimizer: MakeOptimizer = adamw, steps: int = STEPS
) -> Trained:
    """One process that plays all ranks: its loss is the mean over their losses.

    Computed once in a process for all stages and tests; global random numbers are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        return _train_reference(case, world_size, make_optimizer, steps)


@lru_cache(maxsize=256)
def _train_reference(
    case: Case, world_size: int, make_optimizer: MakeOptimizer, steps: int
) -> Trained:
    model = case.seeded_build()
    optimizer = make_optimizer(model.parameters())
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(steps):
        for rank in range(world_size):
            loss = 0.0
            for micro_loss in micro_losses(model, case, step, rank):
                (micro_loss / world_size).backward()
                loss += micro_loss.item()
            losses[rank].append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: t.clone() for name, t in model.state_dict().items()})


def shared_reference(case: Case, make_optimizer: MakeOptimizer = adamw) -> Trained:
    """train_reference by rank 0 alone: each rank gets its losses, and rank 0 the state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trained = train_reference(case, world_size, make_optimizer) if rank == 0 else Trained([], {})
    losses: list[list[list[float]]] = [trained.losses]
    dist.broadcast_object_list(losses)
    return Trained([losses[0][rank]], trained.state)


def train_sharded(
    case: Case,
    stage: int,
    make_optimizer: MakeOptimizer = adamw,
    steps: int = STEPS,
    **options: Any,
) -> Trained:
    """This rank's part of the same training; the state is full on rank 0 and {} elsewhere."""
    print(f"{case.name} at stage {stage}", flush=True)  # shown if the rank fails
    options.setdefault("units", list(case.units) if case.units else None)
    model = zerocore.shard(case.seeded_build(), stage=stage, **options)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        losses.append(accumulate(model, case, step))
        optimizer.step()
        optimizer.zero_grad()
    return Trained([losses], zerocore.full_state_dict(model))


def micro_losses(model: nn.Module, case: Case, step: int, rank: int) -> Iterable[Tensor]:
    """Each micro-batch's share of the loss of one step of one rank."""
    for index, num_samples in enumerate(MICRO_BATCHES):
        batch = case.seeded_batch(step * len(MICRO_BATCHES) + index, rank, num_samples)
        yield case.loss(model, batch) * (num_samples / sum(MICRO_BATCHES))


def accumulate(
    model: nn.Module, case: Case, step: int, sync_every: bool = False, rank: int | None = None
) -> float:
    """Runs all micro-batches of one step, communicating in the last one or in every one."""
    batches = iter(micro_losses(model, case, step, dist.get_rank() if rank is None else rank))
    total = 0.0
    for index in range(len(MICRO_BATCHES)):
        sync = sync_every or index == len(MICRO_BATCHES) - 1
        with nullcontext() if sync else zerocore.no_sync(model):
            loss = next(batches)
            loss.backward()
        total += loss.item()
    return total


def reference_gradients(case: Case, world_size: int, step: int = 0) -> dict[str, Tensor]:
    """Every parameter's gradient, averaged over the ranks, of one step; zeros where unused.

    Computed once, as train_reference.
    """
    with torch.random.fork_rng(devices=[]):
        return dict(_reference_gradients(case, world_size, step))


@lru_cache(maxsize=256)
def _reference_gradients(case: Case, world_size: int, step: int) -> dict[str, Tensor]:
    model = case.seeded_build()
    for rank in range(world_size):
        for loss in micro_losses(model, case, step, rank):
            (loss / world_size).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def assert_gradients(model: nn.Module, case: Case, step: int = 0) -> None:
    """The gradients that `model` holds are those of one process after one step from the start."""
    expected = reference_gradients(case, dist.get_world_size(), step)
    torch.testing.assert_close(full_gradients(model), expected, rtol=1e-5, atol=1e-6)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's full averaged gradient, on every rank; zeros where it is None."""
    own = {name: _own_gradient(parameter) for name, parameter in model.named_parameters()}
    gradients = dict(own)
    for dtype in dict.fromkeys(gradient.dtype for gradient in own.values()):
        names = [name for name, gradient in own.items() if gradient.dtype == dtype]
        flat = torch.cat([own[name] for name in names])  # one collective for all
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)
        sums = torch.stack(parts).sum(0, dtype=dtype).split([own[name].numel() for name in names])
        gradients.update(zip(names, sums, strict=True))
    for name, parameter in model.named_parameters():
        # Ranks own disjoint ranges, or (replicated gradients) all own the same.
        whole = range_of(parameter) == (0, own[name].numel())
        gradients[name] = (own if whole else gradients)[name].view(parameter.shape)
    return gradients


def _own_gradient(parameter: Any) -> Tensor:
    """A vector of all of the parameter's elements, zeros where this rank has no gradient."""
    full = torch.zeros(parameter.shape.numel(), dtype=parameter.dtype)
    if parameter.grad is not None:
        start, end = range_of(parameter)
        full[start:end] = own_of(parameter.grad)
    return full


def assert_same_training(actual: list[Trained], expected: Trained) -> None:
    """Losses to 1e-6 relative, parameters to 1e-5; `actual` is what each rank returned."""
    losses = [rank.losses[0] for rank in actual]
    torch.testing.assert_close(losses, expected.losses, rtol=1e-6, atol=0.0)
    assert_same_state(actual[0].state, expected.state)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and values to 1e-5."""
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5)


def compare_with_one_process(
    name: str,
    stage: int,
    make_optimizer: MakeOptimizer,
    make_reference: MakeOptimizer | None = None,
) -> None:
    """This rank's losses, and the parameters on rank 0, equal those of one process.

    That uses the same kind of optimizer unless it is given another.
    """
    case = case_named(name)
    expected = shared_reference(case, make_reference or make_optimizer)
    assert_same_training([train_sharded(case, stage, make_optimizer)], expected)


def case_named(name: str) -> Case:
    """The case; ranks get its name, as functions in it cannot be sent."""
    return CASES[name]
