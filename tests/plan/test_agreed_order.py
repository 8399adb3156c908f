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
        self.apply(self.schedule.leave_pass())
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
    """One forward, with its backward if `grad`; whether the ranks made the same calls."""
    passes = [rank.forward(tree, grad) for rank, tree in zip(ranks, calls, strict=True)]
    wanted: list[int | None] = [next(each) for each in passes]
    tapes: list[Tape] = []
    while not tapes:
        served = min((unit for unit in wanted if unit is not None), default=None)
        opened = [rank.schedule.open_calls() for rank in ranks]
        for rank in ranks:
            rank.schedule.hear_open_calls([any(bits) for bits in zip(*opened, strict=True)])
        for index, each in enumerate(passes):
            try:
                wanted[index] = each.send(served)
            except StopIteration as end:
                tapes.append(end.value)
    agreed = len({rank.schedule.hash() for rank in ranks}) == 1
    needs = [any(bits) for bits in zip(*(rank.schedule.needs() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.schedule.finish_pass(agreed, needs)
    if grad:
        for rank, tape in zip(ranks, tapes, strict=True):
            rank.backward(tape)
    for rank in ranks:
        assert rank.collectives == ranks[0].collectives
        assert not rank.resident
    return agreed


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


def entered(rank: Rank) -> list[int]:
    """The units of the order of calls."""
    return [event.unit for event in rank.schedule.order if event.enter]


@pytest.mark.parametrize("seed", range(40))
def test_calls_of_all_ranks_are_the_next_order(seed: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(2, 8)
    ranks = make_ranks(3, num_units, prefetch=1)
    tree = random_tree(rng, num_units)
    rng.shuffle(tree)
    calls = some_of(rng, tree, 0.3) or tree[:1]
    assert play(ranks, [calls] * 3)
    order = [event.unit for event in order_of(calls) if event.enter]
    assert all(entered(rank) == order for rank in ranks)
    assert play(ranks, [calls] * 3)
    assert not any(rank.schedule.changed() for rank in ranks)


def test_ranks_that_differ_keep_the_order() -> None:
    ranks = make_ranks(2, 4, prefetch=1)
    with_branch: list[Call] = [(0, ()), (3, ()), (1, ()), (2, ())]
    without: list[Call] = [(0, ()), (1, ()), (2, ())]
    for calls in ([with_branch, without], [without, with_branch]):
        for rank in ranks:
            rank.collectives.clear()
        assert not play(ranks, calls)
        assert all(entered(rank) == [0, 1, 2, 3] for rank in ranks)
        # Behind the order come the calls that were added to it.
        reduced = [unit for name, unit in ranks[0].collectives if name == "reduce"]
        assert reduced == [3, 2, 1, 0]
    assert play(ranks, [with_branch, with_branch])
    assert entered(ranks[0]) == [0, 3, 1, 2]
    assert not play(ranks, [without, with_branch])
    assert entered(ranks[0]) == [0, 3, 1, 2]


def test_a_unit_that_nobody_called_first_is_found_later() -> None:
    ranks = make_ranks(2, 3, prefetch=1)
    both: list[Call] = [(0, ()), (1, ())]
    assert play(ranks, [both, both])
    assert entered(ranks[0]) == [0, 1]
    more: list[Call] = [(2, ()), *both]
    assert not play(ranks, [more, both])
    assert play(ranks, [more, more])
    assert entered(ranks[0]) == [2, 0, 1]
    # A unit that all ranks leave out stays where it is, and is gathered in its turn.
    assert play(ranks, [both, both])
    assert entered(ranks[0]) == [2, 0, 1]


@pytest.mark.parametrize("needed", [False, True])
def test_a_backward_that_any_rank_needs_is_one_of_all(needed: bool) -> None:
    ranks = make_ranks(2, 3, prefetch=0)
    passes, handles = [], []
    for index, rank in enumerate(ranks):
        rank.apply(rank.schedule.begin_pass(True))
        for unit in range(3 - index):  # rank 1 leaves out unit 2
            rank.apply(rank.schedule.enter(unit))
            left = rank.schedule.exit(unit, needs_backward=unit > 0 or (needed and index == 0))
            rank.apply(left.actions)
            handles.append(left.call)
        rank.apply(rank.schedule.leave_pass())
        passes.append(rank.schedule.needs())
    needs = [any(bits) for bits in zip(*passes, strict=True)]
    assert needs == [needed, True, True]
    for rank in ranks:
        rank.schedule.finish_pass(False, needs)
        rank.collectives.clear()
        rank.schedule.begin_backward()
        rank.apply(rank.schedule.pre_backward(handles[3 * ranks.index(rank) + 1]))
        rank.apply(rank.schedule.end_backward())
        gathered = [unit for name, unit in rank.collectives if name == "unshard"]
        assert gathered == ([1, 0] if needed else [1])  # the last one has stayed
