"""A shard as the chunks of ``torch.distributed.checkpoint``: boxes of the full tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerocore.checkpoint.slices.boxes import Box, boxes_of, memory_order
from zerocore.tensor.place import Place

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def chunk_boxes(place: Place) -> list[Box]:
    """The boxes of this rank's elements; one without elements for a tensor that has none."""
    shape = tuple(place.global_shape)
    if place.whole_shape.numel() == 0:
        return [Box((0,) * len(shape), tuple(place.whole_shape), 0)]
    boxes = boxes_of(shape, *place.shard_range, place.strides)
    return boxes if place.part is None else [box.moved(place.part.origin) for box in boxes]


def write_items(fqn: str, place: Place, local: Tensor) -> list[WriteItem]:
    """A save plan's items for a shard. Equal boxes of several ranks are written by one of them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    # Torch reads the dtype alone; its other notes differ between its versions.
    properties = TensorProperties(dtype=local.dtype)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=place.whole_shape),
        )
        for chunk in chunk_list(place)
    ]


def chunk_list(place: Place) -> list[ChunkStorageMetadata]:
    """A load plan's chunks of a shard."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in chunk_boxes(place)
    ]


def find_chunk(place: Place, local: Tensor, index: MetadataIndex) -> Tensor:
    """A view of the elements of the box at ``index.offset``; ValueError if none is there."""
    for box in chunk_boxes(place):
        if torch.Size(box.offsets) == index.offset:
            return box_view(place, local, box)
    raise ValueError(
        f"'{index.fqn}': this rank's elements {place.shard_range[0]}:{place.shard_range[1]} of "
        f"shape {tuple(place.global_shape)} have no chunk at {index.offset}"
    )


def box_view(place: Place, local: Tensor, box: Box) -> Tensor:
    """A view of the local elements (plain, 1-D), of the sizes of one of their boxes."""
    order = memory_order(place.global_shape, place.strides)
    begin = box.begin - place.shard_range[0]
    flat = local[begin : begin + box.numel].view([box.sizes[dim] for dim in order])
    return flat.permute(sorted(range(len(order)), key=order.__getitem__))
