"""The ranks that own and save the elements of a parameter: integers alone.

One rank's elements are found without those of the others, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerocore._C import Layout

_MIN_SHARE_NUMEL = 1 << 14  # of what several ranks hold; below it one of them saves all


@dataclass(frozen=True)
class Cut:
    """How the elements of a parameter are cut over shards."""

    numel: int
    slot_numel: int  # elements of a slot; shards are slots in another order
    offset: int = 0  # of the parameter, from the first slot on
    num_shards: int = 1
    num_across: int = 1  # shards of one replica lie so many slots apart

    @staticmethod
    def whole(numel: int) -> Cut:
        """That of a parameter which is not cut."""
        return Cut(numel, max(numel, 1))

    @staticmethod
    def of(layout: Layout, position: int) -> Cut:
        """That of a unit's parameter."""
        place = layout.places[position]
        if layout.by_rows:  # the first shard has the most rows
            rows = max(layout.owned(position, 0).end, 1)
            return Cut(place.numel, rows, num_shards=layout.num_shards)
        region = layout.regions[place.region]
        slot = region.shard_numel
        return Cut(place.numel, slot, place.offset, layout.num_shards, region.num_across)

    def owned(self, shard: int) -> tuple[int, int]:
        """``(begin, end)`` of a shard's elements; two equal numbers if it has none."""
        column, row = divmod(shard, self.num_shards // self.num_across)
        begin = (row * self.num_across + column) * self.slot_numel - self.offset
        end = min(max(begin + self.slot_numel, 0), self.numel)
        return min(max(begin, 0), end), end

    def ranges(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """``(shard, begin, end)`` of the shards that own elements in a range, in their order."""
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

    cut: Cut  # rank r owns shard r modulo their number
    copies: int = 1  # ranks that own each shard, which save a part each
    members: tuple[int, ...] = ()  # the ranks' numbers, if they are others

    @staticmethod
    def on(ranks: Any, numel: int, place: tuple[Layout, int] | None) -> SavedRanges:
        """Of a parameter that ``ranks``, a :class:`zerocore.model.ranks.Ranks`, hold; ``place``:
        its layout and position, or None if nothing is shared."""
        if place is None:
            return SavedRanges(Cut.whole(numel), ranks.world_size)
        return SavedRanges(Cut.of(*place), ranks.num_replicas)

    def all(self) -> Iterator[tuple[int, int, int]]:
        """``(rank, begin, end)`` of all ranks that save any, in the order of the elements."""
        for shard, begin, end in self.cut.ranges():
            size = self._size(begin, end)
            for copy, start in enumerate(range(begin, end, size)):
                rank = copy * self.cut.num_shards + shard
                number = self.members[rank] if self.members else rank
                yield number, start, min(start + size, end)

    def of(self, number: int) -> tuple[int, int]:
        """``(begin, end)`` of one rank; two equal numbers if it saves none."""
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
