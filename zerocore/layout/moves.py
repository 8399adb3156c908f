"""Moves elements between ranks, from one cut of a parameter to another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting
from zerocore.layout.cuts import Range, or_none


def _overlap(one: Range, other: Range) -> Range:
    return or_none(max(one[0], other[0]), min(one[1], other[1]))


def move(
    local: Tensor,
    present: tuple[Range, ...],
    wanted: tuple[Range, ...],
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
