"""Computes which ranks own and save which elements of a parameter, from integers only.

The cost of one rank's elements does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerocore._C import Layout

_MIN_SHARE_NUMEL = 1 << 14  # the least that one of several ranks with equal elements saves


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter's elements over shards."""

    numel: int
    slot_numel: int  # elements of a slot; shards are slots in another order
    offset: int = 0  # of the parameter in the first slot
    num_shards: int = 1
    num_across: int = 1  # distance in slots between consecutive shards of one replica

    @staticmethod
    def whole(numel: int) -> Cut:
        """Returns the cut of a parameter that is not sharded."""
        return Cut(numel, max(numel, 1))

    @staticmethod
    def of(layout: Layout, position: int) -> Cut:
        """Returns the cut of a unit's parameter."""
        place = layout.places[position]
        if layout.by_rows:  # the first shard has the most rows
            rows = max(layout.owned(position, 0).end, 1)
            return Cut(place.numel, rows, num_shards=layout.num_shards)
        region = layout.regions[place.region]
        slot = region.shard_numel
        return Cut(place.numel, slot, place.offset, layout.num_shards, region.num_across)

    def owned(self, shard: int) -> tuple[int, int]:
        """Returns ``(begin, end)`` of a shard's elements; equal numbers if it has none."""
        column, row = divmod(shard, self.num_shards // self.num_across)
        begin = (row * self.num_across + column) * self.slot_numel - self.offset
        end = min(max(begin + self.slot_numel, 0), self.numel)
        return min(max(begin, 0), end), end

    def ranges(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yields ``(shard, begin, end)`` of the shards that own elements in a range, in order."""
        end = self.numel if end is None else end
        if begin >= end:
            return
        size, offset = self.slot_numel, self.offset
        for slot in range((offset + begin) // size, (offset + end - 1) // size + 1):
            row, column = divmod(slot, self.num_across)
            shard = column * (self.num_shards // self.num_across) + row
            yield shard, max(slot * size - offset, begin), min((slot + 1) * size - offset, end)


@dataclass(frozen=True)
class SavedRanges:
    """The elements of a parameter that each rank saves."""

    cut: Cut  # rank r owns shard ``r % cut.num_shards``
    copies: int = 1  # ranks that own each shard; each saves a part of it
    members: tuple[int, ...] = ()  # the ranks' numbers in the model, if they differ

    @staticmethod
    def on(ranks: Any, numel: int, place: tuple[Layout, int] | None) -> SavedRanges:
        """Returns the ranges of a parameter of ``ranks``, a :class:`zerocore.model.ranks.Ranks`.
        ``place``: its layout and position, or None if every rank has all of it."""
        if place is None:
            return SavedRanges(Cut.whole(numel), ranks.world_size)
        return SavedRanges(Cut.of(*place), ranks.num_replicas)

    def all(self) -> Iterator[tuple[int, int, int]]:
        """Yields ``(rank, begin, end)`` of all ranks that save elements, in their order."""
        for shard, begin, end in self.cut.ranges():
            size = self._size(begin, end)
            for copy, start in enumerate(range(begin, end, size)):
                rank = copy * self.cut.num_shards + shard
                number = self.members[rank] if self.members else rank
                yield number, start, min(start + size, end)

    def of(self, number: int) -> tuple[int, int]:
        """Returns ``(begin, end)`` of one rank; equal numbers if it saves none."""
        if self.members and number not in self.members:
            return 0, 0
        rank = self.members.index(number) if self.members else number
        copy, shard = divmod(rank, self.cut.num_shards)
        begin, end = self.cut.owned(shard) if copy < self.copies else (0, 0)
        start = min(begin + copy * self._size(begin, end), end)
        return start, min(start + self._size(begin, end), end)

    def _size(self, begin: int, end: int) -> int:
        if self.copies == 1:
            return max(end - begin, 1)
        return max(-(-(end - begin) // self.copies), _MIN_SHARE_NUMEL)
