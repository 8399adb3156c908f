"""Loads where each rank needs what its own file holds: no plan is needed, and little is read twice.

A resumed run makes the states of its optimizer to load them: nothing is lost if they are filled
while checksums are compared, before all ranks know that all files are good. What the model computes
with is read after that, from the page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zerocore.checkpoint.byte_ranges import read_into
from zerocore.checkpoint.chunk_reads import Chunk, locate
from zerocore.checkpoint.io_threads import in_threads
from zerocore.checkpoint.save_plan import box_strides
from zerocore.checkpoint.saved_state import SavedState
from zerocore.checkpoint.torch_chunks import chunk_nbytes, data_offset, read_intact
from zerocore.checkpoint.verify import Stored, check_files, check_sums, is_ours
from zerocore.tensor.place import Place


@dataclass
class Target:
    """Memory for a whole chunk of a file.

    Attributes:
        key: of the state.
        memory: plain, 1-D and contiguous, on the CPU.
        form: dtype, sizes and strides that the chunk must have.
        is_new: whether it may be filled before all files are known to be good.
        is_read: whether it holds what the file does.
    """

    key: str
    memory: Tensor
    form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
    is_new: bool
    is_read: bool = False

    def read_checked(self, file: Any, offset: int) -> bool:
        """Reads it; False if the chunk at ``offset`` is of another form, or damaged."""
        self.is_read = read_intact(file.fileno(), offset, self.memory, self.form)
        return self.is_read

    def read(self, file: Any, offset: int) -> None:
        """Reads it, if the chunk at ``offset``, which is intact, is of its form."""
        chunk = locate(file.fileno(), offset, chunk_nbytes(self.memory.nbytes))
        if chunk == Chunk(*self.form, offset + data_offset()):
            read_into(file.fileno(), chunk.begin, chunk.dtype, self.memory)
            self.is_read = True


def own_targets(
    saved: SavedState, metadata: Metadata, new: Container[str]
) -> dict[int, Target] | None:
    """Memory of the shards on the CPU, by the places of their chunks in this rank's file.

    None if this rank needs other bytes than that file has: it was saved on other ranks.

    Args:
        new: keys of what nobody has used yet.
    """
    plan, rank = saved.plan, saved.rank
    names = {plan.file_name(rank) for rank in range(plan.world_size)}
    files = {info.relative_path for info in metadata.storage_data.values()}
    if not (is_ours(metadata) and files <= names):
        return None
    targets = {}
    for piece in plan.pieces_of(rank):
        dtype, spread = plan.tensors[piece.key]
        index = MetadataIndex(piece.key, torch.Size(piece.box.offsets))
        info = metadata.storage_data.get(index)
        facts = metadata.state_dict_metadata[piece.key]
        nbytes = chunk_nbytes(piece.box.numel * dtype.itemsize)
        place = (plan.file_name(rank), nbytes)
        if info is None or (info.relative_path, info.length) != place:
            return None
        is_same = isinstance(facts, TensorStorageMetadata) and facts.properties.dtype == dtype
        local, begin = saved.tensors[piece.key]
        is_shard = isinstance(saved.facts[piece.key][1], Place)
        if is_shard and local.is_cpu and is_same and piece.box.numel > 0:
            memory = local[piece.box.begin - begin :][: piece.box.numel]
            strides = tuple(box_strides(piece.box, spread.strides, spread.shape))
            form = (dtype, tuple(piece.box.sizes), strides)
            targets[info.offset] = Target(piece.key, memory, form, piece.key in new)
    return targets


def verify_own(
    folder: Path, metadata: Metadata, saved: SavedState, targets: dict[int, Target]
) -> None:
    """Compares the checksums of this rank's file, and reads the new targets.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    name = saved.plan.file_name(saved.rank)
    items = check_files(folder, metadata).get(name, [])

    def is_good(item: Stored, file: Any) -> bool:
        target = targets.get(item.offset)
        is_new = target is not None and target.is_new and target.read_checked(file, item.offset)
        return is_new or item.is_good(file)

    if items:
        check_sums(folder, name, sorted(items, key=lambda item: item.offset), is_good=is_good)


def read_rest(folder: Path, saved: SavedState, targets: dict[int, Target]) -> set[str]:
    """Reads the other targets, and says the keys of which all is read.

    Raises:
        OSError: the file is not there any more, or ends before.
    """
    waiting = [(offset, target) for offset, target in targets.items() if not target.is_read]
    if waiting:
        with open(folder / saved.plan.file_name(saved.rank), "rb", buffering=0) as file:
            for _ in in_threads(lambda one: one[1].read(file, one[0]), waiting):
                pass
    found: Counter[str] = Counter()
    for target in targets.values():
        found[target.key] += target.memory.numel() if target.is_read else 0
    return {key for key in found if found[key] == saved.tensors[key][0].numel()}
