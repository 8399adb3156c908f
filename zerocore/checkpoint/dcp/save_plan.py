"""Plans which rank writes which boxes of which tensors, and where; without communication.

Every rank's ranges follow from the layout, so the first rank writes all metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from zerocore.checkpoint.dcp.torch_chunks import MAX_NBYTES, chunk_nbytes
from zerocore.layout.boxes import Box, boxes_of, memory_order
from zerocore.layout.save_ownership import SavedRanges

VALUES = "__0_1.distcp"  # the file of the plain values, named like torch's own files
FORMAT = "zerocore-1"  # the save_id of files whose chunks torch_chunks has framed


@dataclass(frozen=True)
class Spread:
    """The elements of a tensor that each rank writes."""

    shape: tuple[int, ...]  # shape of the full tensor
    ranges: SavedRanges | None = None  # each rank's elements; None if ``parts`` have them
    # Of a tensor that is not C-contiguous: its elements count in memory order.
    strides: tuple[int, ...] | None = None
    # Of a larger tensor: the origin and the spread of each of its parts.
    parts: tuple[tuple[tuple[int, ...], Spread], ...] = ()

    def pieces(self, itemsize: int, only: int | None = None) -> list[tuple[int, Box]]:
        """Returns ``(rank, box)`` of all ranks or one; an empty tensor has one empty box."""
        if prod(self.shape) == 0:
            return [(0, Box((0,) * len(self.shape), self.shape, 0))] if not only else []
        most = MAX_NBYTES // itemsize  # elements of a chunk
        pieces = [
            (rank, box)
            for rank, begin, end in self._ranges(only)
            for start in range(begin, end, most)
            for box in boxes_of(self.shape, start, min(start + most, end), self.strides)
        ]
        return pieces + [
            (rank, box.moved(origin))
            for origin, part in self.parts
            if prod(part.shape) > 0
            for rank, box in part.pieces(itemsize, only)
        ]

    def _ranges(self, only: int | None) -> Iterable[tuple[int, int, int]]:
        if self.ranges is None:
            return ()
        return self.ranges.all() if only is None else [(only, *self.ranges.of(only))]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in a file; its elements are in memory order."""

    key: str
    box: Box
    offset: int  # offset of its chunk in the file
    nbytes: int  # bytes of its elements


@dataclass(frozen=True)
class SavePlan:
    """The files of a save: each tensor's dtype and spread, in the order in the files."""

    tensors: Mapping[str, tuple[torch.dtype, Spread]]
    world_size: int
    _pieces: dict[int, list[Piece]] = field(default_factory=dict, compare=False, repr=False)

    def file_name(self, rank: int) -> str:
        """Returns the name that torch's own writer gives to a rank's file."""
        return f"__{rank}_0.distcp"

    def pieces_of(self, rank: int) -> list[Piece]:
        """Returns the pieces of one rank, in the order in its file."""
        if rank in self._pieces:
            return self._pieces[rank]
        pieces, offset = [], 0
        for key, (dtype, spread) in self.tensors.items():
            for _, box in spread.pieces(dtype.itemsize, rank):
                piece = Piece(key, box, offset, box.numel * dtype.itemsize)
                pieces.append(piece)
                offset += chunk_nbytes(piece.nbytes)
        self._pieces[rank] = pieces
        return pieces

    def file_nbytes(self, rank: int) -> int:
        return sum(chunk_nbytes(piece.nbytes) for piece in self.pieces_of(rank))

    def form_of(self, piece: Piece) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Returns a piece's dtype, sizes and strides; its elements are in the tensor's order."""
        dtype, spread = self.tensors[piece.key]
        sizes, strides, step = piece.box.sizes, [0] * len(spread.shape), 1
        for dim in reversed(memory_order(spread.shape, spread.strides)):
            strides[dim] = step
            step *= max(sizes[dim], 1)
        return dtype, sizes, tuple(strides)

    def metadata(
        self, values: Mapping[str, tuple[int, int]], paths: Mapping[str, Any]
    ) -> dcp.Metadata:
        """Returns the metadata for torch's reader. ``values`` has ``(offset, length)`` of each
        plain value in their file."""
        entries: dict[str, Any] = {}
        places: dict[dcp.MetadataIndex, Any] = {}
        offsets = [0] * self.world_size
        names = [self.file_name(rank) for rank in range(self.world_size)]
        for key, (offset, length) in values.items():
            entries[key] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(key)] = _StorageInfo(VALUES, offset, length)
        # Weights and moments are spread alike: shared objects appear only once in the pickle.
        kinds = {dtype: dcp.TensorProperties(dtype=dtype) for dtype, _ in self.tensors.values()}
        known: dict[tuple[int, int], Any] = {}
        for key, (dtype, spread) in self.tensors.items():
            kind = (id(spread), dtype.itemsize)
            if kind not in known:
                chunks = _chunks(spread, dtype.itemsize)
                known[kind] = (torch.Size(spread.shape), [chunk for _, _, chunk in chunks], chunks)
            shape, boxes, chunks = known[kind]
            for rank, nbytes, chunk in chunks:
                index = dcp.MetadataIndex(key, chunk.offsets)
                places[index] = _StorageInfo(names[rank], offsets[rank], nbytes)
                offsets[rank] += nbytes
            entries[key] = dcp.TensorStorageMetadata(kinds[dtype], shape, boxes)
        meta = dcp.StorageMeta(save_id=FORMAT)
        return dcp.Metadata(entries, dict(paths), places, meta, CURRENT_DCP_VERSION)


def _chunks(spread: Spread, itemsize: int) -> list[tuple[int, int, dcp.ChunkStorageMetadata]]:
    """Returns the rank, the bytes and the box of each chunk."""
    return [
        (
            rank,
            chunk_nbytes(box.numel * itemsize),
            dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
        )
        for rank, box in spread.pieces(itemsize)
    ]
