"""One save on its way to the disk: files of all ranks, metadata, the rename that completes it."""

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

    final: Path  # its name when all is on disk
    saved: SavedState  # this rank's parts
    own: bytes  # what this rank saves for itself
    groups: Sequence[dist.ProcessGroup]  # of the ranks; none for one
    keep: int | None  # how many checkpoints stay; None for all
    # Whether a checkpoint is good; a damaged one may be replaced, and is none of ``keep``.
    known: dict[Path, bool]

    def write(self, copies: Iterable[Tensor] | None) -> None:
        """Writes this rank's files, from copies of ``saved.parts()`` on the CPU or, for None, from
        these themselves, and on the first rank completes the checkpoint. Collective: all ranks
        raise."""
        try:
            with operation(f"Checkpoints.save of '{self.final.name}'"):
                temporary = self._begin()
                parts = self._together(lambda: self._write_files(temporary, copies))
                sums = Checksums({name: each for part in parts for name, each in part.items()})
                self._spread(temporary, sums)
                self._together(lambda: self._commit(temporary, sums))
            self.known[self.final] = True
        finally:
            folder.end(self._temporary)

    @property
    def leader(self) -> int:
        """The rank that makes and names the folder which this one writes to."""
        return 0

    @property
    def is_leader(self) -> bool:
        return self.saved.rank == self.leader

    def _spread(self, temporary: Path, sums: Checksums) -> None:
        """Called when all files of all ranks are written; collective."""

    def _common(self) -> dict[str, bytes]:
        """Small files that say what is in those of all ranks; on the first rank."""
        found = {METADATA: self.saved.metadata()}
        if self.saved.values:
            found[VALUES] = b"".join(self.saved.values.values())
        return found

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
        """Raises FileExistsError if there is something else than a damaged checkpoint."""
        if not self.final.exists() or self.known.get(self.final) is False:
            return
        try:
            if folder.is_checkpoint(self.final):
                from zerocore.checkpoint.dcp.contents import Contents  # late: it reads files

                Contents(self.final).verify()
        except (OSError, ValueError) as error:
            _log.warning("%s is damaged and will be replaced: %s", self.final, error)
        else:
            raise FileExistsError(f"{self.final} exists; checkpoints are never overwritten")

    def _write_files(self, temporary: Path, copies: Iterable[Tensor] | None) -> Checksums:
        """This rank's files, and on the first rank the metadata of all; returns their checksums.
        The small ones are written beside the large one, and flushed behind it: the flush of that
        one does most of the work for them, too."""
        small: list[int] = []
        sums = Checksums()

        def write_small() -> None:
            data = {own_name(self.saved.rank): self.own}
            if self.is_leader:
                data |= self._common()
            for name, each in data.items():
                small.append(files.create(temporary / name))
                files.write_all(small[-1], each)
                sums[name] = FileSums.of(each)

        written: list[Future[None]] = []
        parts = self.saved.parts_on_cpu() if copies is None else copies
        try:
            with ThreadPoolExecutor(1, "checkpoint-small") as thread:
                found = write_rank_file(
                    temporary, self.saved, parts, lambda: written.append(thread.submit(write_small))
                )
            for each in written:
                each.result()
            for file in small:
                files.flush(file)
        finally:
            for file in small:
                files.close(file)
        sums[self.saved.plan.file_name(self.saved.rank)] = found
        return sums

    def _commit(self, temporary: Path, sums: Checksums) -> None:
        """On a leader: gives the folder its name, as all ranks have flushed their files."""
        if not self.is_leader:
            return
        for name, each in self._kept(sums).items():
            found = (temporary / name).stat().st_size
            if found != each.nbytes:
                raise OSError(f"{temporary / name} has {found} bytes, expected {each.nbytes}")
        files.write_file(temporary / NAME, sums.text())
        folder.complete(temporary, self.final)
        damaged = {path for path, is_good in self.known.items() if not is_good} - {self.final}
        folder.delete_old(self.final, self.keep, damaged)

    def _kept(self, sums: Checksums) -> Checksums:
        """Those of the files that are in the folder."""
        return sums

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return on_all_ranks(self.groups, action)


def own_name(rank: int) -> str:
    """The file of what a rank saves for itself."""
    return f"rank-{rank}.pt"
