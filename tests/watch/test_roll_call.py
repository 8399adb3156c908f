"""Requests that a roll call of 2 to 16,384 ranks makes, and what follows from ranks' reports."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tests.bindings import _C_testing
from tests.bindings._C_testing import RankReport, RankState, is_deadlock

SIZES = [2**power for power in range(1, 15)]


def roll_calls(size: int) -> tuple[_C_testing.CountingStore, list[_C_testing.RollCall]]:
    store = _C_testing.CountingStore()
    return store, [_C_testing.RollCall(store, rank, size) for rank in range(size)]


def tell_all(ranks: list[_C_testing.RollCall], silent: tuple[int, ...] = ()) -> None:
    """The last rank raises the alarm; one that waits elsewhere is the odd one."""
    leader = len(ranks) - 1
    for rank in (leader, *range(leader)):
        if rank not in silent:
            assert ranks[rank].step(rank == leader, 7, "odd" if rank == 0 else "even") is None


def hear(rank: _C_testing.RollCall) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (told := rank.step(False, 7, "even")) is not None:
            return told
        time.sleep(0.01)
    raise AssertionError("it was told nothing")


@pytest.mark.parametrize("size", SIZES)
def test_requests_grow_with_the_ranks_alone(size: int) -> None:
    store, ranks = roll_calls(size)
    tell_all(ranks)
    time.sleep(0.1)
    before = store.num_requests
    told = hear(ranks[-1])
    assert store.num_requests - before <= 15  # of the rank that reads
    assert {hear(each) for each in ranks[:-1]} == {told}
    assert "'odd'" in told
    assert store.num_requests <= 12 * size + 7
    assert store.num_bytes <= (400 + 3 * len(told)) * size + 300 * size + 1000


def test_a_rank_reads_in_place_of_the_leader() -> None:
    _, ranks = roll_calls(64)
    tell_all(ranks)
    told = [hear(each) for each in ranks[:-1]]  # the last one is gone
    assert len(set(told)) == 1
    assert "'odd'" in told[0]


def test_ranks_that_ended_or_are_silent_are_named() -> None:
    _, ranks = roll_calls(8)
    ranks[2].note_end("KeyError: 3")
    ranks[3].note_end("")
    tell_all(ranks, silent=(2, 3, 4))
    told = hear(ranks[-1])
    assert "rank 2 ended the program after KeyError: 3; rank 3 has ended its program or" in told
    assert "without an error; rank 4 did not answer within 5 s" in told


def waits(model: int, number: int) -> RankReport:
    return RankReport(model, number, number + 1)


def runs(number: int) -> RankReport:
    return RankReport(0, -1, number)


def test_what_is_a_deadlock() -> None:
    for found in (
        [waits(0, 4), waits(1, 4)],  # of two models
        [waits(0, 4), waits(0, 4), waits(1, 4)],
        [waits(0, 4), waits(1, 4), runs(4)],  # whatever the third does
        [waits(0, 4), RankReport(0, -1, 4, RankState.Ended)],
        [waits(0, 4), RankReport(0, -1, 3, RankState.Ended), runs(9)],
    ):
        for each in itertools.permutations(found):
            assert is_deadlock(list(each))
    for found in (
        [waits(0, 4), waits(0, 4)],  # a slow network
        [waits(0, 4), waits(0, 5)],  # so is this: the second rank has heard more
        [waits(0, 4), runs(4)],
        [waits(0, 4), RankReport(0, -1, 0, RankState.Silent)],
        [waits(0, 4), RankReport(0, -1, 5, RankState.Ended)],  # it has done its part
    ):
        for each in itertools.permutations(found):
            assert not is_deadlock(list(each))


def test_ranks_that_keep_one_order_are_never_a_deadlock() -> None:
    """Wherever each of 2 to 8 ranks is in one sequence, waiting or not."""
    choice = random.Random(0)
    for _ in range(500):
        size = choice.randrange(2, 9)
        reports = []
        for _ in range(size):
            number = choice.randrange(5)
            reports.append(choice.choice((waits(0, number), runs(number + 1))))
        assert not is_deadlock(reports)
