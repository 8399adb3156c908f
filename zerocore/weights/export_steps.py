"""Computes the steps of an export, and the most bytes that they take, from integers only.

All ranks derive the same steps from the same sizes. A unit's gather begins ahead of its turn if the
memory held leaves room. So the peak is ``max_nbytes`` and one unit; two units if shards are rows,
which are copied after their gather, and more if one tensor alone is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

DEFAULT_BUCKET = "1GiB"


class Op(Enum):
    """The operation of a step."""

    BEGIN = "begin"  # begins a unit's gather
    WAIT = "wait"  # waits for the gather
    ADD = "add"  # adds an entry to the bucket
    YIELD = "yield"  # yields the bucket
    DROP = "drop"  # frees a unit


class Step(NamedTuple):
    """One step; ``entry`` is an index into the load's entries."""

    op: Op
    load: int = -1
    entry: int = -1


class Sizes(NamedTuple):
    """The bytes of an exported tensor, and whether it is a copy or a view of its unit."""

    nbytes: int
    copies: bool


@dataclass(frozen=True)
class Load:
    """The sizes of a unit in an export.

    Attributes:
        held_nbytes: bytes that it takes from its gather to its drop.
        received_nbytes: bytes that its gather first receives, until they are copied; 0 for none.
        entries: its exported tensors.
    """

    held_nbytes: int
    received_nbytes: int
    entries: tuple[Sizes, ...]


def export_steps(loads: Sequence[Load], max_nbytes: int) -> list[Step]:
    """Returns the steps of an export whose buckets have at most ``max_nbytes``, or one tensor."""
    return _Steps(loads, max_nbytes).run()


def peak_nbytes(loads: Sequence[Load], max_nbytes: int) -> int:
    """Returns the most device memory that an export takes at a time, beside the model's own."""
    now = copied = peak = 0
    for step in export_steps(loads, max_nbytes):
        load = loads[step.load]
        if step.op is Op.BEGIN:
            now += load.received_nbytes or load.held_nbytes
        elif step.op is Op.WAIT and load.received_nbytes:
            peak = max(peak, now + copied + load.held_nbytes)
            now += load.held_nbytes - load.received_nbytes
        elif step.op is Op.ADD:
            copied += load.entries[step.entry].nbytes * load.entries[step.entry].copies
        elif step.op is Op.DROP:
            now -= load.held_nbytes
        peak = max(peak, now + copied)
        if step.op is Op.YIELD:
            copied = 0
    return peak


class _Steps:
    def __init__(self, loads: Sequence[Load], max_nbytes: int) -> None:
        self.loads = loads
        self.max_nbytes = max_nbytes
        self.steps: list[Step] = []
        self.num_begun = 0
        self.held: set[int] = set()
        self.done: set[int] = set()  # units whose entries are all in a bucket
        self.shown: set[int] = set()  # units with views in the bucket
        self.filled = self.copied = 0  # bytes of the bucket, and of copies in it
        self.is_empty = True

    def run(self) -> list[Step]:
        for number, load in enumerate(self.loads):
            if self.num_begun == number:
                if self.used() > self.max_nbytes:
                    self.flush()
                self.begin()
            copies = sum(sizes.nbytes for sizes in load.entries if sizes.copies)
            self.begin_next(min(copies, self.max_nbytes))
            self.steps.append(Step(Op.WAIT, number))
            has_views = any(not sizes.copies for sizes in load.entries)
            if has_views and self.used() > self.max_nbytes:
                self.flush()
            for entry in range(len(load.entries)):
                self.add(number, entry)
            self.done.add(number)
            if number not in self.shown:
                self.drop(number)
        self.flush()
        return self.steps

    def used(self) -> int:
        return sum(self.loads[number].held_nbytes for number in self.held) + self.copied

    def begin(self) -> None:
        self.steps.append(Step(Op.BEGIN, self.num_begun))
        self.held.add(self.num_begun)
        self.num_begun += 1

    def begin_next(self, reserved: int) -> None:
        if self.num_begun < len(self.loads) and self.used() + reserved <= self.max_nbytes:
            self.begin()

    def add(self, number: int, entry: int) -> None:
        sizes = self.loads[number].entries[entry]
        kept = sum(self.loads[unit].held_nbytes for unit in self.shown - {number}) + self.copied
        if max(self.filled, kept if sizes.copies else 0) + sizes.nbytes > self.max_nbytes:
            self.flush()
        self.steps.append(Step(Op.ADD, number, entry))
        self.filled, self.is_empty = self.filled + sizes.nbytes, False
        if sizes.copies:
            self.copied += sizes.nbytes
        else:
            self.shown.add(number)

    def flush(self) -> None:
        if self.is_empty:
            return
        self.begin_next(0)
        self.steps.append(Step(Op.YIELD))
        self.filled, self.copied, self.is_empty = 0, 0, True
        for number in sorted(self.shown & self.done):
            self.drop(number)
        self.shown.clear()

    def drop(self, number: int) -> None:
        self.steps.append(Step(Op.DROP, number))
        self.held.discard(number)
