"""One save: the files of all ranks, the metadata, and the rename that completes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerocore.checkpoint.checksums import METADATA, NAME, Checksums, FileSums
from zerocore.checkpoint.commit import files, folder
from zerocore.checkpoint.dcp.save_plan import VALUES
from zerocore.checkpoint.dcp.saved_state import SavedState, write_rank_file
from zerocore.common.agreement import on_all_ranks
from zerocore.common.alarm import operation

_log = logging.getLogger("zerocore")


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written."""

    final: Path  # the checkpoint's name when all is on disk
    saved: SavedState  # this rank's parts
    own: bytes  # this rank's other values, such as buffers and random streams
    groups: Sequence[dist.ProcessGroup]  # groups of the model's ranks; empty for one rank
    keep: int | None  # how many checkpoints to keep; None for all
    # By checkpoint: whether it is good. A damaged one may be replaced, and ``keep`` ignores it.
    known: dict[Path, bool]

    def write(self, copies: Iterable[Tensor] | None) -> None:
        """Writes this rank's files, from ``copies`` of ``saved.parts()`` on the CPU, or from the
        parts themselves if None. The first rank completes the checkpoint. Collective: if one rank
        fails, all raise."""
        try:
            with operation(f"Checkpoints.save of '{self.final.name}'"):
                temporary = self._begin()
                parts = self._together(lambda: self._write_files(temporary, copies))
                sums = Checksums({name: file for part in parts for name, file in part.items()})
                self._spread(temporary, sums)
                self._together(lambda: self._commit(temporary, sums))
            self.known[self.final] = True
        finally:
            folder.end(self._temporary)

    @property
    def leader(self) -> int:
        """The rank that makes and names the folder that this rank writes to."""
        return 0

    @property
    def is_leader(self) -> bool:
        return self.saved.rank == self.leader

    def _spread(self, temporary: Path, sums: Checksums) -> None:
        """Does nothing; a subclass may copy files after all ranks have written; collective."""

    def _common(self) -> dict[str, bytes]:
        """Returns the small files that describe all ranks' files; on the first rank."""
        small = {METADATA: self.saved.metadata()}
        if self.saved.values:
            small[VALUES] = b"".join(self.saved.values.values())
        return small

    @cached_property
    def _temporary(self) -> Path:
        """The folder that this rank makes, if it is a leader."""
        return folder.temporary_of(self.final)

    def _begin(self) -> Path:

        def prepare() -> tuple[int, str, str]:
            if self.is_leader:
                self._refuse_good()
                folder.begin(self._temporary)
            return self.saved.rank, self._temporary.name, self.saved.digest()

        answers = self._together(prepare)
        digests = [digest for _, _, digest in answers]
        if len(set(digests)) > 1:
            raise ValueError(f"the ranks would save different tensors: {digests}")
        names = {rank: name for rank, name, _ in answers}
        return self.final.with_name(names[self.leader])

    def _refuse_good(self) -> None:
        """Raises FileExistsError unless the final name is free or a damaged checkpoint's."""
        if not self.final.exists() or self.known.get(self.final) is False:
            return
        try:
            if folder.is_checkpoint(self.final):
                from zerocore.checkpoint.dcp.contents import Contents  # late: it reads files

                Contents(self.final).verify()
        except (OSError, ValueError) as error:
            _log.warning("%s is damaged and will be replaced: %s", self.final, error)
        else:
            raise FileExistsError(f"{self.final} exists and is never overwritten; delete it first")

    def _write_files(self, temporary: Path, copies: Iterable[Tensor] | None) -> Checksums:
        """Writes this rank's files, and on the first rank the metadata; returns their checksums.
        A thread writes small files alongside the large one. They are flushed after the large file,
        whose flush does most of the work for them."""
        small: list[int] = []
        sums = Checksums()

        def write_small() -> None:
            data = {own_name(self.saved.rank): self.own}
            if self.is_leader:
                data |= self._common()
            for name, content in data.items():
                small.append(files.create(temporary / name))
                files.write_all(small[-1], content)
                sums[name] = FileSums.of(content)

        written: list[Future[None]] = []
        parts = self.saved.parts_on_cpu() if copies is None else copies
        try:
            with ThreadPoolExecutor(1, "checkpoint-small") as thread:
                rank_file = write_rank_file(
                    temporary, self.saved, parts, lambda: written.append(thread.submit(write_small))
                )
            for future in written:
                future.result()
            for file in small:
                files.flush(file)
        finally:
            for file in small:
                files.close(file)
        sums[self.saved.plan.file_name(self.saved.rank)] = rank_file
        return sums

    def _commit(self, temporary: Path, sums: Checksums) -> None:
        """Renames the folder on the leader, after all ranks have flushed their files."""
        if not self.is_leader:
            return
        for name, file in self._kept(sums).items():
            size = (temporary / name).stat().st_size
            if size != file.nbytes:
                raise OSError(f"{temporary / name} has {size} bytes, expected {file.nbytes}")
        files.write_file(temporary / NAME, sums.text())
        folder.complete(temporary, self.final)
        damaged = {path for path, is_good in self.known.items() if not is_good} - {self.final}
        folder.delete_old(self.final, self.keep, damaged)

    def _kept(self, sums: Checksums) -> Checksums:
        """Returns the sums of the files that are in the leader's folder."""
        return sums

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return on_all_ranks(self.groups, action)


def own_name(rank: int) -> str:
    """Returns the name of the file with a rank's own values."""
    return f"rank-{rank}.pt"
