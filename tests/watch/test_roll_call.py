"""Roll calls of 2 to 16,384 ranks: their requests, and what the ranks are told."""

from __future__ import annotations

import time

import pytest

from tests.bindings import _C_testing

SIZES = [2**power for power in range(1, 15)]
Ranks = list[_C_testing.RollCall]


def roll_calls(size: int) -> tuple[_C_testing.CountingStore, Ranks]:
    store = _C_testing.CountingStore()
    return store, [_C_testing.RollCall(store, rank, size) for rank in range(size)]


def call(ranks: Ranks, must_end: bool = True, silent: tuple[int, ...] = ()) -> None:
    """The last rank makes the call, and others answer; rank 0 waits in something else."""
    reader = len(ranks) - 1
    for rank in (reader, *range(reader)):
        if rank not in silent:
            caller = rank == reader
            unit = "odd" if rank == 0 and must_end else "even"
            asked = ranks[rank].poll(asks=caller, must_end=caller and must_end, unit=unit)
            assert asked is None


def wait_for(rank: _C_testing.RollCall) -> str:
    """Polls until the rank is told, and returns the text."""
    deadline = time.monotonic() + 10
    while (told := rank.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return told


@pytest.mark.parametrize("size", SIZES)
def test_requests_grow_with_the_ranks_alone(size: int) -> None:
    store, ranks = roll_calls(size)
    call(ranks)
    before = store.num_requests
    told = ranks[-1].poll()
    assert told is not None
    assert "'odd'" in told
    assert store.num_requests - before <= 10  # of the rank that reads
    assert {each.poll() for each in ranks[:-1]} == {told}
    assert store.num_requests <= 5 * size + 10
    assert store.num_bytes <= (400 + len(told)) * size + 1000


def test_ranks_go_on_unless_one_must_end_or_none_can() -> None:
    _, ranks = roll_calls(4)
    call(ranks, must_end=False)
    assert [ranks[rank].poll() for rank in (3, 0, 1, 2)] == [""] * 4
    assert [each.poll() for each in ranks] == [None] * 4  # no other call
    assert ranks[0].poll(asks=True) is None
    for each in ranks[1:]:
        each.poll(unit="odd")  # as against rank 0
    told = wait_for(ranks[0])
    assert "each of ranks 1, 2, 3 waits in all_gather of 'odd'" in told
    assert [each.poll() for each in ranks[1:]] == [told] * 3


def test_one_that_must_end_while_a_call_is_open_ends_it() -> None:
    _, ranks = roll_calls(3)
    call(ranks, must_end=False, silent=(0,))
    assert ranks[1].poll(asks=True, must_end=True) is None
    told = wait_for(ranks[2])
    assert "rank 0 did not answer within 3 s" in told
    assert ranks[1].poll() == told


def test_a_rank_reads_in_place_of_the_caller() -> None:
    _, ranks = roll_calls(8)
    call(ranks)  # the last one is gone
    told = wait_for(ranks[5])
    assert [each.poll() for each in ranks[:5]] == [told] * 5
    assert "'odd'" in told


def test_ranks_that_ended_or_are_silent_are_named() -> None:
    _, ranks = roll_calls(8)
    ranks[2].note_end(" after KeyError: 3")
    ranks[3].note_end("")
    call(ranks, silent=(2, 3, 4))
    told = wait_for(ranks[-1])
    assert "rank 2 ended the program after KeyError: 3; rank 3 ended the program without" in told
    assert "rank 4 did not answer within 3 s" in told
