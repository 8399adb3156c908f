"""The swap ring against a file and buffers that know which version of a unit they have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bindings import _C_testing

TORN = -1
PAGE = 4096


class Memory:
    """Carries out steps as late as they may be, and knows what may not happen."""

    def __init__(self, num_units: int, num_buffers: int) -> None:
        self.ring = _C_testing.SwapRing([PAGE] * num_units, num_buffers, PAGE)
        self.newest = [0] * num_units
        self.file = [0] * num_units
        self.buffers = [(-1, TORN)] * num_buffers  # unit, version
        # By buffer; the version written.
        self.under_way: dict[int, tuple[_C_testing.SwapStep, int]] = {}
        self.held: dict[int, int] = {}  # buffer by unit
        self.counts: Counter[str] = Counter()

    def run(self, steps: Sequence[_C_testing.SwapStep]) -> None:
        for step in steps:
            self.counts[step.kind] += 1
            if step.kind == "await":
                self.complete(*self.under_way.pop(step.buffer))
                continue
            assert step.buffer not in self.under_way
            assert all(other.unit != step.unit for other, _ in self.under_way.values())
            if step.kind == "read":
                assert step.buffer not in self.held.values()
                self.buffers[step.buffer] = (step.unit, TORN)
            assert self.buffers[step.buffer][0] == step.unit
            self.under_way[step.buffer] = (step, self.buffers[step.buffer][1])

    def complete(self, step: _C_testing.SwapStep, version: int) -> None:
        if step.kind == "read":
            self.buffers[step.buffer] = (step.unit, self.file[step.unit])
        else:  # what changed while it was written is torn
            is_whole = self.buffers[step.buffer] == (step.unit, version)
            self.file[step.unit] = version if is_whole else TORN

    def acquire(self, unit: int) -> None:
        buffer, steps = self.ring.acquire(unit)
        self.run(steps)
        assert buffer not in self.held.values()
        assert self.buffers[buffer] == (unit, self.newest[unit])
        assert [held[0] for held in self.buffers].count(unit) == 1
        step, _ = self.under_way.get(buffer, (None, 0))
        assert step is None or step.kind == "write"
        self.held[unit] = buffer

    def release(self, unit: int, changed: bool) -> None:
        buffer = self.held.pop(unit)
        if changed:
            self.newest[unit] += 1
            self.buffers[buffer] = (unit, self.newest[unit])
        steps = self.ring.release(unit, changed)
        self.run(steps)
        for index, step in enumerate(steps):  # nobody needs yet what has only just begun
            assert step.kind != "await" or step.buffer not in {s.buffer for s in steps[:index]}

    def finish(self) -> None:
        self.run(self.ring.finish())
        assert self.under_way == {} and self.file == self.newest
        self.buffers = [(-1, TORN)] * len(self.buffers)  # whoever comes next is read


@given(st.data(), st.integers(1, 9), st.integers(1, 6))
@settings(deadline=None, max_examples=300)
def test_units_have_their_newest_bytes(data: st.DataObject, num_units: int, buffers: int) -> None:
    """Uses in the expected order or another, several at a time, changed or not."""
    memory = Memory(num_units, buffers)
    units = st.integers(0, num_units - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        order = data.draw(st.lists(units, max_size=20))
        memory.run(memory.ring.expect(order))
        uses = order if data.draw(st.booleans()) else data.draw(st.lists(units, max_size=20))
        for unit in uses:
            if unit in memory.held or len(memory.held) == buffers:
                for held in list(memory.held):
                    memory.release(held, data.draw(st.booleans()))
            memory.acquire(unit)
            if data.draw(st.booleans()):
                memory.release(unit, data.draw(st.booleans()))
        for held in list(memory.held):
            memory.release(held, data.draw(st.booleans()))
        if data.draw(st.booleans()):
            memory.finish()
    memory.finish()


def names(steps: Sequence[_C_testing.SwapStep]) -> list[str]:
    return [f"{step.kind} {step.unit} in {step.buffer}" for step in steps]


def test_one_is_read_and_one_written_while_one_is_in_use() -> None:
    """A read begins two uses before its unit's, a write is awaited one release after it began."""
    ring = _C_testing.SwapRing([PAGE] * 5, 3, PAGE)
    assert names(ring.expect(range(5))) == ["read 0 in 0", "read 1 in 1"]
    found = []
    for unit in range(5):
        found += [(names(ring.acquire(unit)[1]), names(ring.release(unit, True)))]
    assert found == [
        (["await 0 in 0"], ["write 0 in 0", "read 2 in 2"]),
        (["await 1 in 1"], ["write 1 in 1", "await 0 in 0", "read 3 in 0"]),
        (["await 2 in 2"], ["write 2 in 2", "await 1 in 1", "read 4 in 1"]),
        (["await 3 in 0"], ["write 3 in 0"]),
        (["await 4 in 1"], ["write 4 in 1"]),
    ]
    assert names(ring.finish()) == ["await 3 in 0", "await 4 in 1", "await 2 in 2"]


def fewest_reads(order: Sequence[int], buffers: int) -> int:
    """Of any choice (Belady 1966): the unit that is used again last gives way."""
    kept: list[int] = []
    reads = 0
    for place, unit in enumerate(order):
        rest = [*order[place + 1 :], *kept]  # one that is not used again comes behind
        if unit not in kept:
            reads += 1
            if len(kept) == buffers:
                kept.remove(max(kept, key=rest.index))
            kept.append(unit)
    return reads


@pytest.mark.parametrize("buffers", [1, 2, 3, 5, 8])
def test_reads_are_few(buffers: int) -> None:
    """Reading two uses ahead costs no more than two buffers; on the way there and back nothing."""
    chance = random.Random(buffers)
    orders = [[*range(8), *reversed(range(8))], [*range(8)] * 3]
    orders += [[chance.randrange(8) for _ in range(30)] for _ in range(30)]
    for index, order in enumerate(orders):
        memory = Memory(8, buffers)
        memory.run(memory.ring.expect(order))
        for unit in order:
            memory.acquire(unit)
            memory.release(unit, False)
        spare = 0 if index == 0 else 2
        assert memory.counts["read"] <= fewest_reads(order, max(1, buffers - spare))
        assert memory.counts["write"] == 0


def test_ranges_and_buffers() -> None:
    ring = _C_testing.SwapRing([1, 0, 4096, 5000], 2, PAGE)
    ranges = [(ring.range(unit).begin, ring.range(unit).end) for unit in range(4)]
    assert ranges == [(0, 4096), (4096, 4096), (4096, 8192), (8192, 16384)]
    assert (ring.file_nbytes, ring.buffer_nbytes, ring.num_buffers) == (16384, 8192, 2)
    assert names(ring.expect([1, 0])) == ["read 0 in 1"]  # nothing to read of the empty one
    assert names(ring.acquire(1)[1]) == names(ring.release(1, True)) == []


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="num_buffers must be at least 1, got 0"):
        _C_testing.SwapRing([1], 0, PAGE)
    ring = _C_testing.SwapRing([1, 1, 1], 2, PAGE)
    ring.acquire(0)
    with pytest.raises(ValueError, match="unit 0 is held already"):
        ring.acquire(0)
    with pytest.raises(ValueError, match="unit 1 is not held"):
        ring.release(1, False)
    ring.acquire(1)
    with pytest.raises(RuntimeError, match="unit 2: all 2 buffers are held"):
        ring.acquire(2)
