"""Loads each rank's own file if it holds all that the rank needs: without a plan, in one pass.

The file is read from begin to end, and each block is summed while the next ones arrive. A resumed
run makes new optimizer states, so they may be filled before all ranks know that all files are
good. Weights in use are read past the page cache and kept beside the model until then, if the
budget allows. Else they are read a second time, from the page cache, which takes no new memory: to
allocate memory costs more than to read cached bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from zerocore._C import FileStream, HostMemory, StreamWay
from zerocore.checkpoint.byte_ranges import in_threads, num_threads, read_into
from zerocore.checkpoint.checked_reads import check_blocks
from zerocore.checkpoint.commit.files import memory_of
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.save_plan import VALUES
from zerocore.checkpoint.dcp.saved_state import SavedState
from zerocore.checkpoint.dcp.torch_chunks import HEAD_NBYTES, chunk_nbytes, has_form
from zerocore.checkpoint.safe_files import opened, size_of
from zerocore.layout.place import Place

_AHEAD_NBYTES = 64 << 20  # a disk reads this much while names and shapes are compared
_ALIGNMENT = 64
_VALUE_NBYTES, _VALUES_NBYTES = 1 << 10, 1 << 20  # limits of a small tensor, and of all of them


@dataclass
class Target:
    """Memory for a whole chunk of a file."""

    key: str  # key in the state to load
    memory: Tensor  # plain, 1-D and contiguous, on the CPU
    form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, sizes, strides to expect
    # Memory to fill before all files are verified: ``memory`` itself if it is new, else a buffer of
    # its size if the budget has room, else None.
    landing: Tensor | None
    fits: bool = False  # the chunk has the expected form
    is_read: bool = False  # ``landing``, and finally ``memory``, has the values of the file
    is_value: bool = False  # the memory is a copy of a small tensor for all ranks, not a shard

    def read(self, file: Any, offset: int) -> None:
        """Fills ``memory`` from the intact chunk at ``offset`` if it fits, or from ``landing``."""
        if not self.is_read and self.fits:
            read_into(file.fileno(), offset + HEAD_NBYTES, self.memory.dtype, self.memory)
            self.is_read = True
        elif self.landing is not None and self.landing is not self.memory:
            self.memory.copy_(self.landing)
            self.landing = None


def own_targets(
    saved: SavedState, contents: Contents, new: Container[str]
) -> dict[int, Target] | None:
    """Returns the memory of the shards on the CPU, by offsets of their chunks in this rank's file;
    None if other ranks saved them, so that the rank needs other files. ``new``: keys of new
    memory."""
    plan, rank, metadata = saved.plan, saved.rank, contents.metadata
    names = {VALUES, *(plan.file_name(rank) for rank in range(plan.world_size))}
    if not (contents.is_ours and set(contents.files) <= names):
        return None
    targets = {}
    for piece in plan.pieces_of(rank):
        form = plan.form_of(piece)
        index = MetadataIndex(piece.key, torch.Size(piece.box.offsets))
        info = metadata.storage_data.get(index)
        facts = metadata.state_dict_metadata[piece.key]
        place = (plan.file_name(rank), chunk_nbytes(piece.nbytes))
        if info is None or (info.relative_path, info.length) != place:
            return None
        is_same = isinstance(facts, TensorStorageMetadata) and facts.properties.dtype == form[0]
        if not is_same or piece.box.numel == 0:
            continue
        local, begin = saved.tensors[piece.key]
        if not isinstance(saved.facts[piece.key][1], Place):
            if local.nbytes <= _VALUE_NBYTES:
                value = torch.empty(local.numel(), dtype=form[0], device="cpu")
                targets[info.offset] = Target(piece.key, value, form, value, is_value=True)
        elif local.is_cpu:
            memory = local[piece.box.begin - begin :][: piece.box.numel]
            landing = memory if piece.key in new else None
            targets[info.offset] = Target(piece.key, memory, form, landing)
    return targets


def values_of(targets: dict[int, Target]) -> dict[str, tuple[torch.dtype, bytes]]:
    """Returns the small tensors that were read, up to the size of a message."""
    values, nbytes = {}, 0
    for target in targets.values():
        nbytes += target.memory.nbytes if target.is_value else 0
        if target.is_value and target.is_read and nbytes <= _VALUES_NBYTES:
            data = bytes(memory_of(target.memory))
            values[target.key] = target.memory.dtype, data
    return values


def keep_beside(waiting: Sequence[Target]) -> None:
    """Allocates the ``landing`` of targets whose memory is in use."""
    ends = list(accumulate(-(-target.memory.nbytes // _ALIGNMENT) for target in waiting))
    memory = HostMemory(_ALIGNMENT * ends[-1] if ends else 0)
    for target, begin in zip(waiting, [0, *ends], strict=False):
        dtype = target.memory.dtype
        target.landing = memory.view(_ALIGNMENT * begin, target.memory.numel(), dtype)


class OwnFile:
    """This rank's file, if there is one; it may keep ``budget`` bytes beside the model."""

    def __init__(self, path: Path, budget: int) -> None:
        self.path, self._budget = path, budget
        self._stream: FileStream | None = None

    def begin(self) -> None:
        """Begins to read ahead for :meth:`verify`; the file must be this rank's."""
        # Parts of a larger file may need a second read, from the page cache.
        if self.path.exists() and size_of(self.path) <= self._budget:
            self._stream = self._open(StreamWay.ANY)

    def _open(self, way: StreamWay) -> FileStream:
        ahead = min(_AHEAD_NBYTES, self._budget)
        return FileStream(str(self.path), ahead, num_threads(), way)

    def verify(self, contents: Contents, targets: dict[int, Target]) -> None:
        """Compares all checksums, and fills each target's ``landing``."""
        name = self.path.name
        if name not in contents.files:
            return  # this rank has no shards in the checkpoint
        sums = contents.sums_of(name)
        if sums is None:
            return
        in_use = [target for target in targets.values() if target.landing is None]
        if self._stream is None:
            fits = sum(target.memory.nbytes for target in in_use) <= self._budget
            self._stream = self._open(StreamWay.ANY if fits else StreamWay.CACHED)
        if self._stream.is_direct:  # else the second read comes from the page cache
            keep_beside(in_use)
        runs: list[tuple[int, Tensor]] = []
        heads: list[tuple[Tensor, Target]] = []
        for offset, target in sorted(targets.items()):
            head = torch.empty(HEAD_NBYTES, dtype=torch.uint8, device="cpu")
            heads.append((head, target))
            runs.append((offset, head))
            if target.landing is not None:
                runs.append((offset + HEAD_NBYTES, target.landing))
        keys_in = partial(contents.keys_in, name)
        check_blocks(self.path, sums, 0, self._stream.read(runs), keys_in)
        for head, target in heads:
            target.fits = has_form(bytes(memory_of(head)), *target.form)
            if target.fits and target.landing is not None:
                target.landing[:0].zero_()  # raises the version, which the read has not done
                target.is_read = True

    def read_rest(self, saved: SavedState, targets: dict[int, Target]) -> set[str]:
        """Fills the memory of all shards; returns the keys that need no other file."""
        self._stream = None
        shards = {at: target for at, target in targets.items() if not target.is_value}
        if shards:
            with opened(self.path) as file:
                for _ in in_threads(lambda item: item[1].read(file, item[0]), shards.items()):
                    pass
        num_read: Counter[str] = Counter()
        for target in shards.values():
            num_read[target.key] += target.memory.numel() if target.is_read else 0
        return {key for key, (local, _) in saved.tensors.items() if num_read[key] == local.numel()}
