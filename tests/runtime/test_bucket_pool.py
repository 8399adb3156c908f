"""The flat-bucket allocator: reuse, statistics, no allocation once warm."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerocore._C import CpuBucketPool


def test_a_released_slot_is_used_again() -> None:
    pool = CpuBucketPool()
    slot = pool.acquire(256)
    address = slot.address
    pool.release(slot)
    assert slot.nbytes == 0
    assert pool.acquire(256).address == address
    assert pool.stats.num_allocations == 1


def test_statistics() -> None:
    pool = CpuBucketPool()
    first, second = pool.acquire(100), pool.acquire(60)
    assert (pool.stats.in_use_nbytes, pool.stats.reserved_nbytes) == (160, 160)
    pool.release(first)
    pool.release(second)
    third = pool.acquire(100)
    stats = pool.stats
    assert (stats.in_use_nbytes, stats.peak_nbytes, stats.reserved_nbytes) == (100, 160, 160)
    pool.forget_recent_peak()
    assert (pool.stats.recent_peak_nbytes, pool.stats.peak_nbytes) == (100, 160)
    pool.release(third)
    pool.forget_recent_peak()
    pool.release(pool.acquire(60))
    assert (pool.stats.recent_peak_nbytes, pool.stats.peak_nbytes) == (60, 160)


def test_an_empty_slot_costs_nothing() -> None:
    pool = CpuBucketPool()
    slot = pool.acquire(0)
    pool.release(slot)
    pool.release(slot)
    assert pool.stats.num_allocations == 0


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([16, 64, 1024])), max_size=60))
@settings(deadline=None, max_examples=100)
def test_a_repeated_sequence_allocates_only_once(moves: list[tuple[bool, int]]) -> None:
    pool = CpuBucketPool()

    def play() -> None:
        held = []
        for take, nbytes in moves:
            if take:
                held.append(pool.acquire(nbytes))
            elif held:
                pool.release(held.pop(0))
        addresses = [slot.address for slot in held]
        assert len(set(addresses)) == len(addresses)
        for slot in held:
            pool.release(slot)

    play()
    after_first = pool.stats.num_allocations
    play()
    assert pool.stats.num_allocations == after_first
    assert pool.stats.in_use_nbytes == 0
