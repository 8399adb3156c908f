"""Boxes of a range: against counting every element, over random shapes, orders and ranges."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
import torch

from zerocore.layout.boxes import Box, boxes_of
from zerocore.layout.chunks import box_view, chunk_boxes
from zerocore.layout.place import Place


def test_boxes_hold_each_element_once_in_order() -> None:
    draw = random.Random(0)
    for _ in range(20_000):
        shape = [draw.randrange(1, 6) for _ in range(draw.randrange(5))]
        order = draw.sample(range(len(shape)), len(shape))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        numbers = np.arange(prod(shape)).reshape([shape[dim] for dim in order])
        full = numbers.transpose(inverse)
        begin, end = sorted(draw.randrange(prod(shape) + 1) for _ in range(2))
        strides = [stride // full.itemsize for stride in full.strides]
        boxes = boxes_of(shape, begin, end, strides)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found: list[int] = []
        for box in boxes:
            part = full[tuple(map(slice, box.offsets, np.add(box.offsets, box.sizes)))]
            found += part.transpose(order).reshape(-1).tolist()
            assert found[-box.numel] == box.begin
        assert found == list(range(begin, end)), (shape, order, begin, end)


@pytest.mark.parametrize(
    ("shape", "begin", "end", "boxes"),
    [
        ((), 0, 1, [Box((), (), 0)]),
        ((), 0, 0, []),
        ((4,), 1, 3, [Box((1,), (2,), 1)]),
        ((3, 4), 0, 12, [Box((0, 0), (3, 4), 0)]),
        ((3, 4), 2, 11, [Box((0, 2), (1, 2), 2), Box((1, 0), (1, 4), 4), Box((2, 0), (1, 3), 8)]),
        ((3, 4), 5, 7, [Box((1, 1), (1, 2), 5)]),
        ((0, 4), 0, 0, []),
    ],
)
def test_boxes_of_small_ranges(
    shape: tuple[int, ...], begin: int, end: int, boxes: list[Box]
) -> None:
    assert boxes_of(shape, begin, end) == boxes


def test_views_of_channels_last() -> None:
    full = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    flat = full.permute(0, 2, 3, 1).reshape(-1)
    place = Place("w", full.shape, (7, 101), None, full.stride())
    local, filled = flat[7:101], torch.full_like(full, -1.0)
    for box in chunk_boxes(place):
        begins = zip(box.offsets, box.sizes, strict=True)
        filled[tuple(slice(begin, begin + size) for begin, size in begins)] = box_view(
            place, local, box
        )
    expected = torch.where(torch.isin(full, local), full, -1.0)
    assert torch.equal(filled, expected)


def test_a_tensor_without_elements_has_one_chunk() -> None:
    assert chunk_boxes(Place("w", torch.Size((0, 3)), (0, 0))) == [Box((0, 0), (0, 3), 0)]
