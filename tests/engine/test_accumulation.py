"""Gradient accumulation: right gradients, and collectives only where they belong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named, micro_losses
from tests.distributed.values import full_of

CASES = ("plain", "scalars", "tied", "experts", "looped", "frozen", "mixed_dtypes")
REDUCTIONS = ("reduce_scatter", "all_reduce")


def accumulate_steps(stage: int, mode: str, sync_every: bool) -> None:
    """Every other model; any two of model, stage, mode and reductions meet."""
    for name in CASES[(stage + (mode == "full") + sync_every) % 2 :: 2]:
        case = case_named(name)
        model = zerocore.shard(
            case.seeded_build(), stage=stage, communication=zerocore.Communication(accumulate=mode)
        )
        for step in range(2):  # the second one finds everything warm
            accumulate(model, case, step, sync_every)
            assert_gradients(model, case, step)
            model.zero_grad()


@pytest.mark.one_by_day
@pytest.mark.parametrize("sync_every", [False, True])
@pytest.mark.parametrize("mode", ["sharded", "full"])
def test_gradients(stage: int, mode: str, sync_every: bool) -> None:
    run_ranks(accumulate_steps, 3, stage, mode, sync_every)


def accumulate_over_steps(stage: int, mode: str) -> None:
    """Not zeroing the gradients adds up steps."""
    case = case_named("plain")
    model = zerocore.shard(
        case.seeded_build(), stage=stage, communication=zerocore.Communication(accumulate=mode)
    )
    accumulate(model, case, 0)
    accumulate(model, case, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    assert_gradients(model, case, 0)


@pytest.mark.parametrize("mode", ["sharded", "full"])
def test_gradients_add_up_until_zeroed(stage: int, mode: str) -> None:
    run_ranks(accumulate_over_steps, 2, stage, mode)


def count_reductions(stage: int, mode: str) -> tuple[int, int, int]:
    """Reductions under no_sync, in the backward outside of it, and the number of units."""
    case = case_named("plain")
    model = zerocore.shard(
        case.seeded_build(), stage=stage, communication=zerocore.Communication(accumulate=mode)
    )
    accumulate(model, case, 0)
    model.zero_grad()
    losses = iter(micro_losses(model, case, 1, 0))
    with zerocore.reporting.record_events(model) as held, zerocore.no_sync(model):
        next(losses).backward()
    with zerocore.reporting.record_events(model) as synced:
        next(losses).backward()
    predicted = sum(op in REDUCTIONS for op, _, _ in zerocore.planning.predict_events(model))
    return _reductions(held), _reductions(synced), predicted


def _reductions(events: list[zerocore.reporting.Event]) -> int:
    return sum(event.op in REDUCTIONS for event in events)


@pytest.mark.parametrize("mode", ["sharded", "full"])
def test_no_sync_communicates_only_to_free_gradients(stage: int, mode: str) -> None:
    for held, synced, predicted in run_ranks(count_reductions, 2, stage, mode):
        reduces_at_once = stage >= 2 and mode == "sharded"
        assert held == (predicted if reduces_at_once else 0)
        assert synced == predicted > 0


def leave_no_sync_by_error(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    with pytest.raises(KeyError), zerocore.no_sync(model):
        raise KeyError
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_no_sync_ends_with_its_block(stage: int) -> None:
    run_ranks(leave_no_sync_by_error, 2, stage)


class Sometimes(nn.Module):
    """Calls its second layer where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, calls_second: bool) -> Tensor:
        y = self.always(x)
        return self.sometimes(y).sum() + y.sum() if calls_second else y.sum()


def gradients_of(system: str, stage: int, mode: str) -> list[Tensor]:
    """Of two steps of three micro-batches. In the second step one rank alone uses the second layer,
    in the first of them."""
    torch.manual_seed(0)
    plain: Any = Sometimes()
    model: nn.Module = plain
    if system == "ddp":
        model = DistributedDataParallel(plain, find_unused_parameters=True)
    elif system == "zerocore":
        how = zerocore.Communication(accumulate=mode)
        zerocore.shard(plain, stage=stage, units=["Linear"], communication=how)
    else:
        for module in (plain.always, plain.sometimes, plain):
            zerocore.fsdp.fully_shard(module)
    gradients: list[Tensor] = []
    for step in range(2):
        for number in range(3):
            holds = number < 2
            if system == "ddp":
                context = model.no_sync() if holds else nullcontext()
            elif system == "zerocore":
                context = zerocore.no_sync(model) if holds else nullcontext()
            else:
                plain.set_requires_gradient_sync(not holds)
                context = nullcontext()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + number))
            rank = torch.distributed.get_rank()
            with context:
                model(x * (1 + rank), (step, number, rank) == (1, 0, 0)).backward()
        for param in plain.parameters():
            if param.grad is not None:
                gradients.append(full_of(param.grad).clone())
        plain.zero_grad()
    return gradients


def compare_with_ddp(stage: int, mode: str) -> None:
    expected = gradients_of("ddp", stage, mode)
    faces = ("zerocore", "zerocore.fsdp") if stage == 3 and mode == "full" else ("zerocore",)
    for system in faces:
        torch.testing.assert_close(gradients_of(system, stage, mode), expected)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mode", ["sharded", "full"])
def test_a_unit_that_the_last_backward_leaves_out(stage: int, mode: str, world_size: int) -> None:
    """Its gradients of backwards without sync are those of all ranks, as with DDP."""
    run_ranks(compare_with_ddp, world_size, stage, mode)
