"""Requests that a roll call of 2 to 16,384 ranks makes, and the sentence without its leader."""

from __future__ import annotations

import pytest

from tests.bindings import _C_testing

SIZES = [2**power for power in range(1, 15)]


def roll_calls(size: int) -> tuple[_C_testing.CountingStore, list[_C_testing.RollCall]]:
    store = _C_testing.CountingStore()
    return store, [_C_testing.RollCall(store, rank, size) for rank in range(size)]


def tell_all(ranks: list[_C_testing.RollCall], silent: tuple[int, ...] = ()) -> None:
    """The last rank raises the alarm; one that waits elsewhere is the odd one."""
    leader = len(ranks) - 1
    for rank in (leader, *range(leader)):
        if rank not in silent:
            assert ranks[rank].next(rank == leader)
            ranks[rank].tell(7, "odd" if rank == 0 else "even")


@pytest.mark.parametrize("size", SIZES)
def test_requests_grow_with_the_ranks_alone(size: int) -> None:
    store, ranks = roll_calls(size)
    tell_all(ranks)
    before = store.num_requests
    told = ranks[-1].hear()
    assert store.num_requests - before <= 10  # of the rank that reads
    assert {each.hear() for each in ranks[:-1]} == {told}
    assert "'odd'" in told
    assert store.num_requests <= 8 * size + 7
    assert store.num_bytes <= (400 + len(told)) * size + 1000


def test_a_rank_reads_in_place_of_the_leader() -> None:
    _, ranks = roll_calls(64)
    tell_all(ranks)
    told = [each.hear() for each in ranks[:-1]]  # the last one is gone
    assert len(set(told)) == 1
    assert "'odd'" in told[0]


def test_ranks_that_ended_or_are_silent_are_named() -> None:
    _, ranks = roll_calls(8)
    ranks[2].note_end(" after KeyError: 3")
    ranks[3].note_end("")
    tell_all(ranks, silent=(2, 3, 4))
    told = ranks[-1].hear()
    assert "rank 2 ended the program after KeyError: 3; rank 3 ended the program without" in told
    assert "rank 4 did not answer within 3 s" in told
