"""Converts boxes to chunks of ``torch.distributed.checkpoint``, whose import takes a second."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerocore.layout.boxes import box_view, chunk_boxes
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
