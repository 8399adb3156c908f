"""Boxes of a range: which rectangles of a tensor a run of its flattened elements fills.

A run of elements of an n-dimensional tensor is at most 2n - 1 boxes: for each dimension but the
first a piece at its begin and one at its end, and whole rows between them. These are the chunks of
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from zerocore.layout.place import Place


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: where it begins, its sizes, and its first element in the flat order.

    Its elements lie one after the other there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    def moved(self, by: Sequence[int]) -> Box:
        """The box in a larger tensor, which the tensor is a part of."""
        offsets = tuple(own + more for own, more in zip(self.offsets, by, strict=True))
        return Box(offsets, self.sizes, self.begin)

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(
    shape: Sequence[int], begin: int, end: int, strides: Sequence[int] | None = None
) -> list[Box]:
    """Disjoint boxes that hold the elements ``begin:end``, in their order, which is that of memory
    where there are ``strides`` of a dense tensor."""
    order = memory_order(shape, strides)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return [
        Box(
            tuple(box.offsets[dim] for dim in inverse),
            tuple(box.sizes[dim] for dim in inverse),
            box.begin,
        )
        for box in _split([shape[dim] for dim in order], begin, end, 0)
    ]


def memory_order(shape: Sequence[int], strides: Sequence[int] | None) -> list[int]:
    """The dimensions of a dense tensor from the outermost to the innermost in memory."""
    dims = list(range(len(shape)))
    if strides is None:
        return dims
    # A dimension of size 1 may have any stride; among equal ones its place does not matter.
    return sorted(dims, key=lambda dim: (-strides[dim], shape[dim] != 1))


def _split(shape: list[int], begin: int, end: int, base: int) -> list[Box]:
    """As ``boxes_of`` of a C-contiguous tensor whose first element is the ``base``-th."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), (), base)]
    row = prod(shape[1:])
    first, after = -(-begin // row), end // row  # whole rows
    if first > after:  # within one row
        return _in_row(shape, after, begin, end, base)
    head = _in_row(shape, first - 1, begin, first * row, base) if begin < first * row else []
    tail = _in_row(shape, after, after * row, end, base) if after * row < end else []
    if first == after:
        return head + tail
    zeros, rest = (0,) * (len(shape) - 1), tuple(shape[1:])
    return [*head, Box((first, *zeros), (after - first, *rest), base + first * row), *tail]


def _in_row(shape: list[int], index: int, begin: int, end: int, base: int) -> list[Box]:
    start = index * prod(shape[1:])
    inner = _split(shape[1:], begin - start, end - start, base + start)
    return [Box((index, *box.offsets), (1, *box.sizes), box.begin) for box in inner]


def chunk_boxes(place: Place) -> list[Box]:
    """The boxes of this rank's elements; one without elements for a tensor that has none."""
    shape = tuple(place.global_shape)
    if place.whole_shape.numel() == 0:
        return [Box((0,) * len(shape), tuple(place.whole_shape), 0)]
    boxes = boxes_of(shape, *place.shard_range, place.strides)
    return boxes if place.part is None else [box.moved(place.part.origin) for box in boxes]


def box_view(place: Place, local: Tensor, box: Box) -> Tensor:
    """A view of the local elements (plain, 1-D), of the sizes of one of their boxes."""
    order = memory_order(place.global_shape, place.strides)
    begin = box.begin - place.shard_range[0]
    flat = local[begin : begin + box.numel].view([box.sizes[dim] for dim in order])
    return flat.permute(sorted(range(len(order)), key=order.__getitem__))
