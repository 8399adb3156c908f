"""Boxes of a range: the rectangles of a tensor that a run of its flattened elements fills.

A run of elements of an n-dimensional tensor is at most 2n - 1 boxes: whole rows, and for each
dimension but the first one box before them and one after them. These are the chunks of
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: its offsets, its sizes, and the flat index of its first element.

    Its elements are contiguous in the flat order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    def moved(self, by: Sequence[int]) -> Box:
        """Returns the box in a larger tensor that has the tensor at offset ``by``."""
        offsets = tuple(at + more for at, more in zip(self.offsets, by, strict=True))
        return Box(offsets, self.sizes, self.begin)

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(
    shape: Sequence[int], begin: int, end: int, strides: Sequence[int] | None = None
) -> list[Box]:
    """Returns disjoint boxes of the elements ``begin:end``, in order. With ``strides`` of a dense
    tensor, elements count in memory order."""
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
    """Returns a dense tensor's dimensions from the outermost to the innermost in memory."""
    dims = list(range(len(shape)))
    if strides is None:
        return dims
    # A dimension of size 1 may have any stride: its order among equal strides does not matter.
    return sorted(dims, key=lambda dim: (-strides[dim], shape[dim] != 1))


def _split(shape: list[int], begin: int, end: int, base: int) -> list[Box]:
    """Returns ``boxes_of`` a C-contiguous tensor whose first element has the index ``base``."""
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
