"""Cuts of a parameter into shards, and moves of elements from one cut to another."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting

_Range = tuple[int, int]


class Cut(NamedTuple):
    """The cut of a parameter by the shards of its region: every rank knows all ranges."""

    offset: int  # of the parameter's first element in the region
    shard_numel: int  # of the region
    num_across: int = 1  # consecutive shards that belong to different replicas
    # Slices taken one of the other: the length of the sliced vector, start, stop and step.
    slices: tuple[tuple[int, int, int, int], ...] = ()


@lru_cache(maxsize=4096)
def ranges_of(cut: Cut, numel: int, num_shards: int) -> tuple[_Range, ...]:
    """Returns each rank's range of a parameter of ``numel`` elements, (0, 0) if it has none."""
    if cut.slices:
        (before, start, stop, step), inner = cut.slices[-1], cut._replace(slices=cut.slices[:-1])
        counts = [
            tuple(len(range(start, min(stop, bound), step)) for bound in elements)
            for elements in ranges_of(inner, before, num_shards)
        ]
        return tuple((begin, end) if begin < end else (0, 0) for begin, end in counts)
    num_within = num_shards // cut.num_across
    ranges = []
    for shard in range(num_shards):
        place = shard % num_within * cut.num_across + shard // num_within
        begin = place * cut.shard_numel - cut.offset
        ranges.append(_overlap((0, numel), (begin, begin + cut.shard_numel)))
    return tuple(ranges)


def _overlap(one: _Range, other: _Range) -> _Range:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else (0, 0)


def move(
    local: Tensor,
    present: tuple[_Range, ...],
    wanted: tuple[_Range, ...],
    group: dist.ProcessGroup,
    what: str,
) -> Tensor:
    """Moves elements from the ranks' ``present`` ranges to their ``wanted`` ones; collective."""
    rank, nbytes = group.rank(), local.element_size()
    sent = [_overlap(present[rank], span) for span in wanted]
    received = [_overlap(wanted[rank], span) for span in present]
    first = present[rank][0]
    outgoing = torch.cat([local[begin - first : end - first] for begin, end in sent])
    incoming = local.new_empty(sum(end - begin for begin, end in received))
    with waiting(group, what):
        dist.all_to_all_single(
            incoming.view(torch.uint8),
            outgoing.view(torch.uint8),
            [(end - begin) * nbytes for begin, end in received],
            [(end - begin) * nbytes for begin, end in sent],
            group=group,
        )
    result = local.new_empty(wanted[rank][1] - wanted[rank][0])
    first = wanted[rank][0]
    parts = incoming.split([end - begin for begin, end in received])
    for (begin, end), part in zip(received, parts, strict=True):
        result[begin - first : end - first] = part
    return result
