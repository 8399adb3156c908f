"""Gradient accumulation: right gradients, and collectives only where they belong."""

from __future__ import annotations

import pytest

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named, micro_losses

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
