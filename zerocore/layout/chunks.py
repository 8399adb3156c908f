"""Converts boxes to chunks of ``torch.distributed.checkpoint``, whose import takes a second."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerocore.layout.boxes import Box, boxes_of, memory_order
from zerocore.layout.place import Place


def write_items(fqn: str, place: Place, local: Tensor) -> list[WriteItem]:
    """Returns a save plan's items for a shard. One rank writes the equal boxes of several ranks."""
    # Torch reads only the dtype; the other properties differ between its versions.
    properties = dcp.TensorProperties(dtype=local.dtype)
    return [
        WriteItem(
            index=dcp.MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=place.whole_shape),
        )
        for chunk in chunk_list(place)
    ]


def chunk_list(place: Place) -> list[dcp.ChunkStorageMetadata]:
    """Returns a load plan's chunks of a shard."""
    return [
        dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in chunk_boxes(place)
    ]


def find_chunk(place: Place, local: Tensor, index: dcp.MetadataIndex) -> Tensor:
    """Returns a view of the box at ``index.offset``; ValueError if there is none."""
    for box in chunk_boxes(place):
        if torch.Size(box.offsets) == index.offset:
            return box_view(place, local, box)
    raise ValueError(
        f"'{index.fqn}': this rank's elements {place.shard_range[0]}:{place.shard_range[1]} of "
        f"shape {tuple(place.global_shape)} have no chunk at {index.offset}"
    )


def chunk_boxes(place: Place) -> list[Box]:
    """Returns the boxes of this rank's elements; one empty box for an empty tensor."""
    shape = tuple(place.global_shape)
    if place.whole_shape.numel() == 0:
        return [Box((0,) * len(shape), tuple(place.whole_shape), 0)]
    boxes = boxes_of(shape, *place.shard_range, place.strides)
    return boxes if place.part is None else [box.moved(place.part.origin) for box in boxes]


def box_view(place: Place, local: Tensor, box: Box) -> Tensor:
    """Returns a view of the local elements (plain, 1-D) with the sizes of one of their boxes."""
    order = memory_order(place.global_shape, place.strides)
    begin = box.begin - place.shard_range[0]
    flat = local[begin : begin + box.numel].view([box.sizes[dim] for dim in order])
    return flat.permute(sorted(range(len(order)), key=order.__getitem__))
