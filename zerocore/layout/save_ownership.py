"""Computes which ranks save which elements of a parameter, from integers only.

The cost of one rank's elements does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place

_MIN_SHARE_NUMEL = 1 << 14  # the least that one of several ranks with equal elements saves


@dataclass(frozen=True)
class SavedRanges:
    """The elements of a parameter that each rank saves."""

    cut: Cut  # rank r owns shard ``r % cut.num_shards``
    copies: int = 1  # ranks that own each shard; each saves a part of it
    members: tuple[int, ...] = ()  # the ranks' numbers in the model, if they differ

    @staticmethod
    def on(ranks: Any, place: Place) -> SavedRanges:
        """Returns the ranges of a parameter of ``ranks``, a :class:`zerocore.model.ranks.Ranks`."""
        if place.group is None:
            return SavedRanges(Cut.whole(place.global_shape.numel()), ranks.world_size)
        assert place.cut is not None
        return SavedRanges(place.cut, ranks.num_replicas)

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
