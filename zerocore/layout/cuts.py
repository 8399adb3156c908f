"""Cuts of a parameter into shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zerocore._C import Layout

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter's elements over shards: every rank knows all ranges.

    The cost of one shard's range does not depend on the number of shards.
    """

    numel: int
    slot_numel: int  # elements of a slot; a slot is a shard, but slots may have another order
    offset: int = 0  # offset of the parameter's first element in the first slot
    num_shards: int = 1
    num_across: int = 1  # distance in slots between consecutive shards of one replica
    slices: tuple[range, ...] = ()  # of the flat parameter: each slice is one of the slice before

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
        """Yields ``(shard, begin, end)`` of shards that own elements of ``begin:end``, in order."""
        end = self.numel if end is None else end
        if begin >= end:
            return
        size, offset = self.slot_numel, self.offset
        for slot in range((offset + begin) // size, (offset + end - 1) // size + 1):
            row, column = divmod(slot, self.num_across)
            shard = column * (self.num_shards // self.num_across) + row
            yield shard, max(slot * size - offset, begin), min((slot + 1) * size - offset, end)

    @cached_property
    def spans(self) -> tuple[Range, ...]:
        """Each shard's range of the last slice; (0, 0) if it has none of it."""
        spans = tuple(or_none(*self.owned(shard)) for shard in range(self.num_shards))
        for items in self.slices:
            spans = tuple(or_none(*taken(items, span)) for span in spans)
        return spans


def taken(items: range, span: Range) -> Range:
    """Returns the range of the items of a slice that lie in ``span`` of the sliced vector."""
    begin, end = (len(range(items.start, min(items.stop, at), items.step)) for at in span)
    return begin, end


def or_none(begin: int, end: int) -> Range:
    """Returns the range; (0, 0) if it is empty."""
    return (begin, end) if begin < end else (0, 0)
