"""The flat-bucket allocator: places that are shared, statistics, no allocation once warm."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bindings import _C_testing

KIB = 1024


def play(pool: _C_testing.CpuBucketPool, moves: list[tuple[int, int]]) -> dict[int, int]:
    """Acquires a block of each (unit, bytes), gives back one of (unit, 0); addresses by unit.

    The rest is given back at the end. Blocks held at the same time never overlap.
    """
    held: dict[int, _C_testing.Slot] = {}
    sizes: dict[int, int] = {}
    addresses: dict[int, int] = {}
    for unit, nbytes in moves:
        if nbytes == 0:
            pool.release(held.pop(unit))
            continue
        slot = held[unit] = pool.acquire(unit, nbytes)
        sizes[unit], addresses[unit] = nbytes, slot.address
        spans = sorted((each.address, each.address + each.nbytes) for each in held.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for slot in held.values():
        pool.release(slot)
    assert pool.stats.in_use_nbytes == 0
    return addresses


def taking_turns(sizes: list[int]) -> list[tuple[int, int]]:
    """Each block is acquired before the one before it is given back."""
    moves: list[tuple[int, int]] = []
    for unit, nbytes in enumerate(sizes):
        moves += [(unit, nbytes), *([(unit - 1, 0)] if unit else [])]
    return moves


def test_blocks_that_take_turns_share_an_arena_of_the_highest_use() -> None:
    """Of one large and many small blocks, two at a time; by size they would take 8 + 2 + 1 KiB."""
    pool = _C_testing.CpuBucketPool()
    moves = taking_turns([8 * KIB, KIB, 2 * KIB, KIB, 2 * KIB, KIB])
    play(pool, moves)
    assert pool.stats.reserved_nbytes == 0  # each had memory of its own
    play(pool, moves)
    stats = pool.stats
    assert (stats.peak_nbytes, stats.reserved_nbytes) == (9 * KIB, 9 * KIB)


def test_a_block_has_the_same_place_in_every_step() -> None:
    pool = _C_testing.CpuBucketPool()
    moves = taking_turns([8 * KIB, KIB, 2 * KIB])
    play(pool, moves)
    allocations = pool.stats.num_allocations
    assert play(pool, moves) == play(pool, moves)
    assert pool.stats.num_allocations == allocations + 1  # the arena


def test_statistics() -> None:
    pool = _C_testing.CpuBucketPool()
    first, second = pool.acquire(0, 100), pool.acquire(1, 60)
    assert (pool.stats.in_use_nbytes, pool.stats.reserved_nbytes) == (160, 160)
    pool.release(first)
    pool.release(second)
    third = pool.acquire(0, 100)
    stats = pool.stats
    assert (stats.in_use_nbytes, stats.peak_nbytes) == (100, 160)
    assert (stats.reserved_nbytes, stats.peak_reserved_nbytes) == (1024, 1024)  # aligned places
    assert stats.num_allocations == 3
    pool.forget_recent_peak()
    assert (pool.stats.recent_peak_nbytes, pool.stats.peak_nbytes) == (100, 160)
    pool.release(third)
    pool.forget_recent_peak()
    pool.release(pool.acquire(1, 60))
    assert (pool.stats.recent_peak_nbytes, pool.stats.peak_nbytes) == (60, 160)


def test_an_empty_slot_costs_nothing() -> None:
    pool = _C_testing.CpuBucketPool()
    slot = pool.acquire(0, 0)
    pool.release(slot)
    pool.release(slot)
    assert pool.stats.num_allocations == 0


def test_a_step_that_does_something_else_is_served_and_learned_from() -> None:
    pool = _C_testing.CpuBucketPool()
    moves = taking_turns([4 * KIB] * 4)
    for _ in range(2):
        play(pool, moves)
    assert pool.stats.reserved_nbytes == 8 * KIB
    together = [(unit, 4 * KIB) for unit in range(4)]
    play(pool, together)
    assert pool.stats.peak_reserved_nbytes == 16 * KIB  # two have a place, two memory of their own
    play(pool, together)
    allocations = pool.stats.num_allocations
    for each in (together, moves, together):
        play(pool, each)
    assert pool.stats.num_allocations == allocations
    assert pool.stats.reserved_nbytes == 16 * KIB


def test_a_block_that_grew_gets_a_place_of_its_new_size() -> None:
    pool = _C_testing.CpuBucketPool()
    for nbytes in (KIB, KIB, 4 * KIB, 4 * KIB):
        play(pool, [(0, nbytes)])
    allocations = pool.stats.num_allocations
    play(pool, [(0, 4 * KIB)])
    assert pool.stats.num_allocations == allocations
    assert pool.stats.reserved_nbytes == 4 * KIB


def test_what_is_held_apart_does_not_shape_the_arena() -> None:
    pool = _C_testing.CpuBucketPool()
    moves = taking_turns([KIB] * 8)
    for _ in range(2):
        play(pool, moves)
    pool.set_apart(True)
    play(pool, [(unit, KIB) for unit in range(8)])
    pool.set_apart(False)
    assert pool.stats.reserved_nbytes == 2 * KIB
    allocations = pool.stats.num_allocations
    play(pool, moves)
    assert pool.stats.num_allocations == allocations


def test_a_failed_allocation_changes_nothing() -> None:
    pool = _C_testing.CpuBucketPool()
    moves = taking_turns([4 * KIB] * 4)
    for _ in range(2):
        play(pool, moves)
    before = figures(pool)
    with pytest.raises(RuntimeError, match="memory"):
        pool.acquire(9, 1 << 60)
    with pytest.raises(RuntimeError, match="memory"):
        pool.acquire(0, 1 << 60)  # a block that has a smaller place
    held = pool.acquire(3, 4 * KIB)
    with pytest.raises(RuntimeError, match="memory"):
        pool.acquire(0, 1 << 60)
    pool.release(held)
    assert figures(pool) == before
    play(pool, moves)
    assert figures(pool) == before


def figures(pool: _C_testing.CpuBucketPool) -> tuple[int, ...]:
    stats = pool.stats
    return (
        stats.in_use_nbytes,
        stats.peak_nbytes,
        stats.reserved_nbytes,
        stats.peak_reserved_nbytes,
        stats.num_allocations,
    )


def test_another_order_is_packed_for_and_the_old_one_forgotten() -> None:
    """Neighbours of both orders would need more than the two blocks that are held at a time."""
    pool = _C_testing.CpuBucketPool()
    sizes = [4 * KIB] * 12
    shuffled = random.Random(1).sample(range(12), 12)
    for order in (range(12), shuffled, shuffled[::-1]):
        moves: list[tuple[int, int]] = []
        for index, unit in enumerate(order):
            moves += [(unit, sizes[unit]), *([(order[index - 1], 0)] if index else [])]
        for _ in range(3):
            play(pool, moves)
        allocations = pool.stats.num_allocations
        play(pool, moves)
        assert pool.stats.num_allocations == allocations
        assert pool.stats.reserved_nbytes == 8 * KIB


def test_another_order_in_every_step_does_not_make_the_arena_grow() -> None:
    """Any two of 64 blocks are neighbours some time; nothing like the sum of all is kept."""
    pool, rng = _C_testing.CpuBucketPool(), random.Random(0)
    for _ in range(100):
        units = rng.sample(range(64), 64)
        moves: list[tuple[int, int]] = []
        for index, unit in enumerate(units):
            moves += [(unit, 4 * KIB), *([(units[index - 1], 0)] if index else [])]
        play(pool, moves)
    stats = pool.stats
    assert stats.peak_nbytes == 8 * KIB
    assert stats.reserved_nbytes <= stats.peak_nbytes * 3 // 2
    assert stats.peak_reserved_nbytes <= stats.peak_nbytes * 5 // 2


@pytest.mark.parametrize("seed", range(20))
def test_a_change_while_blocks_are_held_waits_until_none_is(seed: int) -> None:
    rng, pool = random.Random(seed), _C_testing.CpuBucketPool()
    for _ in range(20):
        moves, held = [], set()
        for _ in range(40):
            if held and rng.random() < 0.5:
                unit = rng.choice(sorted(held))
                held.remove(unit)
                moves.append((unit, 0))
            elif free := sorted(set(range(8)) - held):
                unit = rng.choice(free)
                held.add(unit)
                moves.append((unit, rng.choice([16, 600, 4 * KIB])))
        play(pool, moves)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([16, 64, 1024])), max_size=40))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_a_repeated_step_allocates_nothing(moves: list[tuple[bool, int]]) -> None:
    """Blocks are given back first in, first out."""
    pool = _C_testing.CpuBucketPool()
    turns: list[tuple[int, int]] = []
    held: list[int] = []
    for unit, (take, nbytes) in enumerate(moves):
        if take:
            held.append(unit)
            turns.append((unit, nbytes))
        elif held:
            turns.append((held.pop(0), 0))
    for _ in range(2):
        play(pool, turns)
    allocations = pool.stats.num_allocations
    assert play(pool, turns) == play(pool, turns)
    assert pool.stats.num_allocations == allocations
