"""Parameters that take no part: no hang, right gradients, and no delay for the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    accumulate,
    assert_gradients,
    assert_same_training,
    case_named,
    shared_reference,
    train_sharded,
)

CASES = ("branches", "experts", "unused", "skipped_middle", "skipped_ends", "discarded")


def find_unused(stage: int, name: str) -> None:
    case = case_named(name)
    expected = shared_reference(case)
    assert_same_training([train_sharded(case, stage)], expected)


@pytest.mark.parametrize("name", CASES)
def test_unused_parameters(stage: int, name: str) -> None:
    run_ranks(find_unused, 3, stage, name)


def look_at_unused(stage: int) -> None:
    """A parameter that no rank used has no gradient, as in one process."""
    case = case_named("branches")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.endswith("unused"), name
    assert_gradients(model, case, 0)


def test_what_nobody_used_has_no_gradient(stage: int) -> None:
    run_ranks(look_at_unused, 2, stage)


def reduce_in_turn(stage: int) -> list[tuple[str, int]]:
    """Reductions of a backward in the order in which they were issued."""
    case = case_named("branches")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    for step in range(2):
        accumulate(model, case, step)
        model.zero_grad()
    batch = case.seeded_batch(9, dist.get_rank(), 2)
    with zerocore.reporting.record_events(model) as events:
        case.loss(model, batch).backward()
    trace = [(event.op, event.unit) for event in sorted(events, key=lambda e: e.issued_ns)]
    return [
        (op, unit) for op, unit in trace if op in ("reduce_scatter", "all_reduce", "all_gather")
    ]


def test_a_unit_with_unused_parameters_is_reduced_in_its_turn() -> None:
    answers = run_ranks(reduce_in_turn, 2, 3)
    assert answers[0] == answers[1]
    trace = answers[0]
    last_gather = max(i for i, (op, _) in enumerate(trace) if op == "all_gather")
    reduced_before = [unit for op, unit in trace[:last_gather] if op == "reduce_scatter"]
    assert reduced_before, "every reduction waited for the end of the backward"
    reduced = [unit for op, unit in trace if op == "reduce_scatter"]
    assert len(reduced) == len(set(reduced))


def change_use(stage: int) -> None:
    """The used parameters change from step to step and from rank to rank."""
    case = case_named("skipped_middle")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    for step in range(6):
        batch = case.seeded_batch(step, dist.get_rank(), 2)
        batch["rank"] = dist.get_rank() + step  # the ranks take turns in skipping
        case.loss(model, batch).backward()
        plain = case.seeded_build()
        for rank in range(dist.get_world_size()):
            batch = case.seeded_batch(step, rank, 2)
            batch["rank"] = rank + step
            (case.loss(plain, batch) / dist.get_world_size()).backward()
        expected = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in plain.named_parameters()
        }
        from tests.distributed.training import full_gradients

        torch.testing.assert_close(full_gradients(model), expected, rtol=1e-5, atol=1e-6)
        model.zero_grad()


@pytest.mark.parametrize("ranks", [*by_night(1, 2), 3])
def test_use_that_changes(stage: int, ranks: int) -> None:
    run_ranks(change_use, ranks, stage)
