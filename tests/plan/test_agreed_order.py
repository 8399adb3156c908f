"""Ranks that take different ways through a model issue one sequence of collectives."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bindings import _C_testing
from tests.plan.driver import Call, order_of, random_tree

Tape = list[tuple[str, int, Any]]  # with the handle of the call
# Yields the unit that a rank needs, or None when it has left the pass; is sent what is served.
Pass = Generator[int | None, int | None, Tape]


@dataclass
class Rank:
    """A schedule, what is resident, and every collective that the rank issued."""

    schedule: _C_testing.Schedule
    resident: set[int] = field(default_factory=set)
    collectives: list[tuple[str, int]] = field(default_factory=list)

    def apply(self, actions: list[_C_testing.Action]) -> None:
        for action in actions:
            if action.kind == "unshard":
                self.resident.add(action.unit)
            elif action.kind == "reshard":
                self.resident.remove(action.unit)
            if action.kind != "reshard":
                self.collectives.append((action.kind, action.unit))

    def forward(self, calls: Sequence[Call], grad: bool) -> Pass:
        self.apply(self.schedule.begin_pass(grad))
        tape: Tape = []
        yield from self._run(calls, tape)
        self.apply(self.schedule.close_pass())
        served = yield None
        while served is not None:
            self.apply(self.schedule.serve(served))
            served = yield None
        return tape

    def _run(self, calls: Sequence[Call], tape: Tape) -> Generator[int | None, int | None, None]:
        for unit, inside in calls:
            if not self.schedule.is_expected(unit):
                self.apply(self.schedule.finish_order())
                served = yield unit
                while served != unit:
                    assert served is not None
                    self.apply(self.schedule.serve(served))
                    served = yield unit
            self.apply(self.schedule.enter(unit))
            position = len(tape)
            assert unit in self.resident
            yield from self._run(inside, tape)
            assert unit in self.resident
            left = self.schedule.exit(unit)
            tape.insert(position, ("enter", unit, left.call))
            tape.append(("exit", unit, left.call))
            self.apply(left.actions)

    def backward(self, tape: Tape) -> None:
        self.schedule.begin_backward()
        left = [unit for kind, unit, _ in tape if kind == "enter"]
        for kind, unit, handle in reversed(tape):
            if kind == "exit":
                self.apply(self.schedule.pre_backward(handle))
            assert unit in self.resident
            if kind == "enter":
                left.remove(unit)
                if unit not in left:
                    self.apply(self.schedule.ready(unit))
        self.apply(self.schedule.end_backward())
        assert not self.resident


def play(ranks: list[Rank], calls: list[list[Call]], grad: bool = True) -> bool:
    """One forward, with its backward if `grad`; whether the ranks had to compare their calls."""
    passes = [rank.forward(tree, grad) for rank, tree in zip(ranks, calls, strict=True)]
    wanted: list[int | None] = [next(each) for each in passes]
    tapes: list[Tape] = []
    while not tapes:
        served = min((unit for unit in wanted if unit is not None), default=None)
        for index, each in enumerate(passes):
            try:
                wanted[index] = each.send(served)
            except StopIteration as end:
                tapes.append(end.value)
    changed = any(rank.schedule.changed() for rank in ranks)
    lists = [rank.schedule.calls() for rank in ranks] if changed else []
    for index, rank in enumerate(ranks):
        rank.schedule.settle_pass(lists, index)
    if grad:
        for rank, tape in zip(ranks, tapes, strict=True):
            rank.backward(tape)
    for rank in ranks:
        assert rank.collectives == ranks[0].collectives
        assert not rank.resident
    return changed


def make_ranks(count: int, num_units: int, prefetch: int) -> list[Rank]:
    order = order_of([(unit, ()) for unit in range(num_units)])
    return [Rank(_C_testing.Schedule(num_units, prefetch, True, True, order)) for _ in range(count)]


def some_of(rng: random.Random, calls: Sequence[Call], left_out: float) -> list[Call]:
    """The calls without some of them, whose own calls may be made in their place."""
    result: list[Call] = []
    for unit, inside in calls:
        kept = some_of(rng, inside, left_out)
        if rng.random() >= left_out:
            result.append((unit, tuple(kept)))
        elif rng.random() < 0.5:
            result += kept
    return result


@pytest.mark.parametrize("prefetch", range(3))
@pytest.mark.parametrize("seed", range(150))
def test_ranks_that_take_different_ways(seed: int, prefetch: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(1, 8)
    ranks = make_ranks(rng.randint(1, 4), num_units, prefetch)
    tree = random_tree(rng, num_units)
    rng.shuffle(tree)
    for step in range(6):
        calls = [some_of(rng, tree, rng.choice([0.0, 0.3])) or tree[:1] for _ in ranks]
        if rng.random() < 0.2:
            rng.shuffle(calls[0])
        play(ranks, calls, grad=step == 0 or rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(40))
def test_ways_that_were_seen_are_not_compared_again(seed: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(2, 8)
    ranks = make_ranks(3, num_units, prefetch=1)
    tree = random_tree(rng, num_units)
    rng.shuffle(tree)
    calls = [some_of(rng, tree, 0.3) or tree[:1] for _ in ranks]
    assert play(ranks, calls)
    assert not play(ranks, calls)


def test_a_branch_registered_last_and_called_in_the_middle() -> None:
    ranks = make_ranks(2, 4, prefetch=1)
    with_branch: list[Call] = [(0, ()), (3, ()), (1, ()), (2, ())]
    without: list[Call] = [(0, ()), (1, ()), (2, ())]
    play(ranks, [with_branch, without])
    for rank in ranks:
        assert [event.unit for event in rank.schedule.order if event.enter] == [0, 3, 1, 2]
        rank.collectives.clear()
    assert not play(ranks, [without, with_branch])
    assert [unit for name, unit in ranks[0].collectives if name == "reduce"] == [2, 1, 3, 0]


def test_a_unit_that_nobody_called_first_is_found_later() -> None:
    ranks = make_ranks(2, 3, prefetch=1)
    play(ranks, [[(0, ())], [(0, ()), (1, ())]])
    assert [event.unit for event in ranks[0].schedule.order if event.enter] == [0, 1]
    play(ranks, [[(2, ()), (0, ())], [(0, ()), (1, ())]])
    assert [event.unit for event in ranks[0].schedule.order if event.enter] == [2, 0, 1]
