"""One save on its way to the disk: files of all ranks, metadata, the rename that completes it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from zerocore.checkpoint import files
from zerocore.checkpoint.checksums import Sums
from zerocore.checkpoint.commit import common_result
from zerocore.checkpoint.saved_state import SavedState, write_rank_file


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written.

    Attributes:
        temporary: the folder that it is written to.
        final: its name when all is on disk.
        saved: this rank's parts.
        own: what this rank saves for itself.
        group: of the ranks; None for one.
    """

    temporary: Path
    final: Path
    saved: SavedState
    own: bytes
    group: dist.ProcessGroup | None

    def write(self, parts: Iterable[Tensor], when_done: Callable[[], None]) -> None:
        """Writes this rank's files, and on the first rank completes the checkpoint. Collective.

        Args:
            parts: as of ``saved.parts()``, on the CPU.
            when_done: called on the first rank when the checkpoint has its name.

        Raises:
            Exception: what went wrong, on the rank where it did; RuntimeError on the others.
        """
        rank = self.saved.rank

        def write_own() -> int:
            crc = files.write_file(self.temporary / own_name(rank), self.own)
            write_rank_file(self.temporary, self.saved, parts)
            return crc

        crcs = self._together(write_own)
        sums = {own_name(rank): crc for rank, crc in enumerate(crcs)}

        def commit() -> None:
            if rank == 0:
                self._commit(sums)
                when_done()

        self._together(commit)

    def _commit(self, sums: dict[str, int]) -> None:
        plan, values = self.saved.plan, self.saved.values
        identity = self.temporary.name.rpartition("-")[2]
        metadata = plan.metadata(self.saved.value_places, self.saved.paths, identity)
        data = pickle.dumps(metadata)
        sizes = {plan.file_name(rank): size for rank, size in enumerate(plan.file_nbytes)}
        for name, size in sizes.items():
            found = (self.temporary / name).stat().st_size
            if found != size:
                raise OSError(f"{self.temporary / name} has {found} bytes, expected {size}")
        sums[".metadata"] = files.write_file(self.temporary / ".metadata", data)
        Sums(sizes, sums, {key: crc32(value) for key, value in values.items()}).write(
            self.temporary
        )
        files.flush_folder(self.temporary)
        files.rename(self.temporary, self.final)
        files.flush_folder(self.final.parent)

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """What ``action`` returns on each rank; what it raises on one is an error on all."""
        return common_result(action, self._gathered)

    def _gathered(self, value: Any) -> list[Any]:
        values = [value]
        if self.group is not None:
            values = [None] * self.group.size()
            dist.all_gather_object(values, value, group=self.group)
        return values


def own_name(rank: int) -> str:
    """The file of what a rank saves for itself."""
    return f"rank-{rank}.pt"
