"""torch.amp.GradScaler: the ranks agree whether a step is made, and on the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import zerocore
from tests.distributed.collectives import count_collectives
from tests.distributed.harness import run_ranks
from tests.distributed.training import MakeOptimizer, accumulate, adamw, case_named
from tests.distributed.values import own_of
from tests.zoo_case import Case

RANKS = 4  # one for each optimizer below; a power of two, so that averages round nothing
STEPS = 6
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw_foreach": partial(torch.optim.AdamW, lr=3e-3, eps=1e-5, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=3e-3, eps=1e-5, fused=True),
    # Without momentum: torch 2.13 leaves its buffer uninitialised where the first step is skipped.
    "sgd_fused": partial(torch.optim.SGD, lr=0.05, fused=True),
}


@dataclass(frozen=True)
class Run:
    """A training's losses[step][rank], and the scale after each step."""

    losses: list[list[float]]
    scales: list[float]


@dataclass(frozen=True)
class Spoil:
    """One rank meets something infinite, in one step in its loss, in another in its elements."""

    rank: int
    step_of_loss: int = 1
    step_of_elements: int = 3

    def factor(self, step: int, rank: int) -> float:
        return math.inf if (step, rank) == (self.step_of_loss, self.rank) else 1.0

    def elements(self, step: int, model: nn.Module, whole: bool) -> None:
        """Where the process holds gradients whole they are the same on all ranks, also if bad."""
        if step == self.step_of_elements and (whole or dist.get_rank() == self.rank):
            for param in model.parameters():
                if param.grad is not None:
                    local = getattr(param.grad, "local", lambda grad=param.grad: grad)()
                    local.view(-1)[-1:] = math.inf


@dataclass
class Training:
    """A training with a scaler, of one rank or of all of them in one process."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    ranks: Sequence[int]
    whole: bool  # this process holds whole gradients

    def backward(self, step: int, dtype: torch.dtype, spoil: Spoil | None) -> list[float]:
        """Forward and backward of every rank that this process plays."""
        losses = []
        for rank in self.ranks:
            batch = self.case.seeded_batch(step, rank, 2)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = self.case.loss(self.model, batch)
            factor = 1.0 if spoil is None else spoil.factor(step, rank)
            self.scaler.scale(loss * factor).backward()
            losses.append(loss.item())
        if len(self.ranks) > 1:
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad /= len(self.ranks)
        return losses

    def run(self, dtype: torch.dtype, spoil: Spoil | None, max_norm: float | None) -> Run:
        losses, scales = [], []
        for step in range(STEPS):
            losses.append(self.backward(step, dtype, spoil))
            if spoil is not None:
                spoil.elements(step, self.model, self.whole)
            if max_norm is not None:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            scales.append(self.scaler.get_scale())
        return Run(losses, scales)


def make(case: Case, optimizer: str, scale: float, stage: int | None = None) -> Training:
    """A training of all ranks, or, if there is a stage, of this one."""
    model, ranks = case.seeded_build(), list(range(RANKS))
    if stage is not None:
        model, ranks = zerocore.shard(model, stage=stage), [dist.get_rank()]
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    whole = stage is None or stage == 0
    return Training(case, model, OPTIMIZERS[optimizer](model.parameters()), scaler, ranks, whole)


@lru_cache(maxsize=64)
def train_plain(
    case_name: str,
    optimizer: str,
    spoiled: int | None,
    max_norm: float | None,
    dtype: torch.dtype,
    scale: float,
) -> tuple[Run, dict[str, torch.Tensor]]:
    """One process that plays all ranks, and its weights; the same for all stages."""
    plain = make(case_named(case_name), optimizer, scale)
    run = plain.run(dtype, None if spoiled is None else Spoil(spoiled), max_norm)
    return run, dict(plain.model.state_dict())


def compare(
    stage: int,
    case_name: str,
    optimizer: str,
    spoiled: int | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Equal to one process that plays all ranks; returns the scale after each step."""
    print(case_name, optimizer, spoiled, max_norm, dtype, flush=True)  # shown if the rank fails
    case = case_named(case_name)
    spoil = None if spoiled is None else Spoil(spoiled)
    # In float16 an ulp may round a weight to another number, and that scale overflows.
    tolerance, scale = (1e-6, 2.0**10) if dtype == torch.float32 else (1e-3, 2.0**19)
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [train_plain(case_name, optimizer, spoiled, max_norm, dtype, scale)]
    dist.broadcast_object_list(shared)
    expected, state = shared[0]
    sharded = make(case, optimizer, scale, stage)
    found = sharded.run(dtype, spoil, max_norm)
    assert found.scales == expected.scales
    losses = [[of_ranks[dist.get_rank()]] for of_ranks in expected.losses]
    torch.testing.assert_close(found.losses, losses, rtol=tolerance, atol=0.0)
    full = zerocore.full_state_dict(sharded.model, rank0_only=False)
    torch.testing.assert_close(full, state, rtol=0.0, atol=10 * tolerance)
    return found.scales


def train_spoiled(stage: int) -> None:
    for rank, optimizer in enumerate(OPTIMIZERS):
        scales = compare(stage, "plain", optimizer, rank)
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**8, 2.0**8, 2.0**9]
        compare(stage, "mixed_dtypes", optimizer, rank)
    compare(stage, "scalars", "adamw_fused")
    compare(stage, "plain", "sgd", RANKS - 1, max_norm=0.1)


@pytest.mark.one_by_day
def test_one_rank_skips_the_step_of_all(stage: int) -> None:
    run_ranks(train_spoiled, RANKS, stage)


def train_in_half(stage: int) -> None:
    for optimizer in OPTIMIZERS:
        scales = compare(stage, "plain", optimizer, dtype=torch.float16)
        assert 1.0 < min(scales) < scales[0]


@pytest.mark.one_by_day
def test_a_scale_that_overflows_float16(stage: int) -> None:
    run_ranks(train_in_half, RANKS, stage)


def agree(stage: int) -> list[float]:
    """Every rank in turn finds something infinite in the smallest model there is."""
    found = []
    for bad in range(RANKS):
        model = zerocore.shard(nn.Linear(2, 2), stage=stage)
        scaler = GradScaler("cpu", init_scale=4.0)
        optimizer = adamw(model.parameters())
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if stage == 0 or dist.get_rank() == bad:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.fill_(math.nan)
        numel = sum(own_of(param).numel() for param in model.parameters())
        holds = torch.tensor([numel])
        dist.broadcast(holds, bad)
        counted = count_collectives(partial(scaler.unscale_, optimizer))
        assert counted == ([1] if stage > 0 else [])
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if holds > 0 else 4.0)
        found.append(scaler.get_scale())
    return found


def test_empty_shards_take_part(stage: int) -> None:
    answers = run_ranks(agree, RANKS, stage)
    assert answers[1:] == answers[:-1]
    assert (4.0 in answers[0]) == (stage > 0)


def count(stage: int) -> None:
    """One collective for each dtype of the gradients, also for an optimizer of one parameter."""
    case = case_named("mixed_dtypes")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    for params, num_dtypes in ((list(model.parameters()), 2), ([model.head.bias], 1)):
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        unscale = partial(scaler.unscale_, adamw(params))
        assert count_collectives(unscale) == ([1] * num_dtypes if stage > 0 else [])


def test_number_of_collectives(stage: int) -> None:
    run_ranks(count, 2, stage)


def take_norm_of_groups() -> None:
    models = [zerocore.shard(nn.Linear(4, 4), group=dist.new_group(r)) for r in ([0, 1], [1, 0])]
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    params = [param for model in models for param in model.parameters()]
    full = torch.cat([param.grad.full_tensor().flatten() for param in params])
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(params, 1e9), full.norm())
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert count_collectives(partial(scaler.unscale_, adamw(params))) == [1, 1]


def test_parameters_of_several_groups() -> None:
    run_ranks(take_norm_of_groups, 2)


def train_offloaded(offload: zerocore.Offload | None, plain: bool = False) -> list[float]:
    """Losses with gradients unscaled by hand; a large eps shows a scale that is left."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    if not plain:
        zerocore.shard(model, units=[nn.Linear], offload=offload)
    make = torch.optim.AdamW if plain else zerocore.optim.AdamW
    optimizer, scaler = make(model.parameters(), lr=0.1, eps=0.1), GradScaler("cpu", 1024.0)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 6)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("part", ["states", "gradients", "parameters"])
def test_gradients_unscaled_by_hand_reach_the_host(part: str) -> None:
    offload = zerocore.Offload(**{part: "cpu"})
    expected = run_ranks(train_offloaded, 2, None, True)
    for found, right in zip(run_ranks(train_offloaded, 2, offload), expected, strict=True):
        assert found == pytest.approx(right, rel=1e-6)
