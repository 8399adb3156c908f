"""One save on its way to the disk: files of all ranks, metadata, the rename that completes it."""

from __future__ import annotations

import uuid
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
        final: its name when all is on disk.
        saved: this rank's parts.
        own: what this rank saves for itself.
        group: of the ranks; None for one.
    """

    final: Path
    saved: SavedState
    own: bytes
    group: dist.ProcessGroup | None

    def write(self, copies: Iterable[Tensor] | None, when_done: Callable[[], None]) -> None:
        """Writes this rank's files, and on the first rank completes the checkpoint. Collective.

        Args:
            copies: of ``saved.parts()``, on the CPU; None to write from the tensors themselves.
            when_done: called on the first rank when the checkpoint has its name.

        Raises:
            Exception: what went wrong, on the rank where it did; RuntimeError on the others.
            ValueError: the ranks would save different tensors.
        """
        temporary = self._begin()
        rank = self.saved.rank

        def write_own() -> int:
            crc = files.write_file(temporary / own_name(rank), self.own)
            write_rank_file(temporary, self.saved, copies)
            return crc

        crcs = self._together(write_own)
        sums = {own_name(rank): crc for rank, crc in enumerate(crcs)}

        def commit() -> None:
            if rank == 0:
                self._commit(temporary, sums)
                when_done()

        self._together(commit)

    def _begin(self) -> Path:
        """Makes the folder, when all ranks want to save the same."""
        identity = uuid.uuid4().hex[:8]

        def prepare() -> tuple[int, str, str]:
            if self.saved.rank == 0:
                _delete_remains(self.final.parent)
                files.make_folder(_temporary(self.final, identity))
            return self.saved.rank, identity, self.saved.digest()

        answers = self._together(prepare)
        if len({digest for _, _, digest in answers}) > 1:
            raise ValueError(f"the ranks would save different tensors: {answers}")
        return _temporary(self.final, min(answers)[1])

    def _commit(self, temporary: Path, sums: dict[str, int]) -> None:
        plan, values = self.saved.plan, self.saved.values
        data = self.saved.metadata(temporary.name.rpartition("-")[2])
        sizes = {plan.file_name(rank): size for rank, size in enumerate(plan.file_nbytes)}
        for name, size in sizes.items():
            found = (temporary / name).stat().st_size
            if found != size:
                raise OSError(f"{temporary / name} has {found} bytes, expected {size}")
        sums[".metadata"] = files.write_file(temporary / ".metadata", data)
        Sums(sizes, sums, {key: crc32(value) for key, value in values.items()}).write(temporary)
        files.flush_folder(temporary)
        files.rename(temporary, self.final)
        files.flush_folder(self.final.parent)

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return together(self.group, action)


def together(group: dist.ProcessGroup | None, action: Callable[[], Any]) -> list[Any]:
    """What ``action`` returns on each rank; what it raises on one is an error on all. Collective.

    Raises:
        Exception: what it raised, on the rank where it did; RuntimeError on the others.
    """

    def gathered(value: Any) -> list[Any]:
        values = [value]
        if group is not None:
            values = [None] * group.size()
            dist.all_gather_object(values, value, group=group)
        return values

    return common_result(action, gathered)


def _temporary(final: Path, identity: str) -> Path:
    return final.with_name(f"{final.name}.tmp-{identity}")


def _delete_remains(folder: Path) -> None:
    """Deletes the folders of saves and deletions that did not come to their end."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("step-*.tmp-*", "step-*.deleted"):
        for path in folder.glob(pattern):
            files.delete_folder(path)


def own_name(rank: int) -> str:
    """The file of what a rank saves for itself."""
    return f"rank-{rank}.pt"
