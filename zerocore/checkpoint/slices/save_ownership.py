"""The ranks that own and save the elements of a parameter: integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerocore._C import Layout

_MIN_SHARE_NUMEL = 1 << 14  # of what several ranks hold; below it one of them saves all


def owned_ranges(layout: Layout, position: int) -> list[tuple[int, int, int]]:
    """``(shard, begin, end)`` of the elements of a unit's parameter, of shards that own any."""
    if layout.by_rows:
        owned = [(shard, layout.owned(position, shard)) for shard in range(layout.num_shards)]
        return [(shard, each.begin, each.end) for shard, each in owned if each.begin < each.end]
    place = layout.places[position]
    size = layout.regions[place.region].shard_numel
    if place.numel == 0:
        return []
    first, last = place.offset // size, (place.offset + place.numel - 1) // size
    across = layout.regions[place.region].num_across
    return [
        (
            slot % across * (layout.num_shards // across) + slot // across,  # as shard_range
            max(slot * size - place.offset, 0),
            min((slot + 1) * size - place.offset, place.numel),
        )
        for slot in range(first, last + 1)
    ]


def saved_ranges(
    owned: Sequence[tuple[int, int, int]], num_shards: int, copies: int
) -> tuple[tuple[int, int, int], ...]:
    """``(rank, begin, end)`` of what each rank saves, of ``(shard, begin, end)`` that ``copies``
    ranks own each: rank r owns shard r modulo ``num_shards``."""
    if copies == 1:
        return tuple(owned)
    saved = []
    for shard, begin, end in owned:
        size = max(-(-(end - begin) // copies), _MIN_SHARE_NUMEL)
        for copy, start in enumerate(range(begin, end, size)):
            saved.append((copy * num_shards + shard, start, min(start + size, end)))
    return tuple(saved)


def ranges_on(
    ranks: Any, numel: int, place: tuple[Layout, int] | None
) -> tuple[tuple[int, int, int], ...]:
    """:func:`saved_ranges` of a parameter; its layout and position, or None if nothing is shared.

    Args:
        ranks: a :class:`zerocore.model.ranks.Ranks`, whose ranks hold the parameter.
    """
    if place is None:
        return saved_ranges([(0, 0, numel)], 1, ranks.world_size)
    return saved_ranges(owned_ranges(*place), ranks.num_shards, ranks.num_replicas)
