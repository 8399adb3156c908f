"""One save on its way to the disk: files of all ranks, metadata, the rename that completes it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from zerocore.checkpoint import checksums, files
from zerocore.checkpoint.checksums import METADATA, Sums
from zerocore.checkpoint.commit import common_result
from zerocore.checkpoint.saved_state import SavedState, write_rank_file
from zerocore.common.alarm import operation, waiting


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
        with operation(f"save of '{self.final.name}'"):
            temporary, sums = self._begin()
            self._together(lambda: self._write_files(temporary, sums, copies))

            def commit() -> None:
                if self.saved.rank == 0:
                    self._commit(temporary)
                    when_done()

            self._together(commit)

    def _begin(self) -> tuple[Path, dict[str, int]]:
        """Makes the folder, when all ranks want to save the same.

        Returns it, and the checksum of what each rank saves for itself.
        """
        identity = uuid.uuid4().hex[:8]

        def prepare() -> tuple[int, str, str, int]:
            if self.saved.rank == 0:
                _delete_remains(self.final.parent)
                files.make_folder(_temporary(self.final, identity))
            return self.saved.rank, identity, self.saved.digest(), crc32(self.own)

        answers = self._together(prepare)
        digests = [digest for _, _, digest, _ in answers]
        if len(set(digests)) > 1:
            raise ValueError(f"the ranks would save different tensors: {digests}")
        sums = {own_name(rank): crc for rank, _, _, crc in answers}
        return _temporary(self.final, min(answers)[1]), sums

    def _write_files(
        self, temporary: Path, sums: dict[str, int], copies: Iterable[Tensor] | None
    ) -> None:
        """This rank's files, and on the first rank those that tell of all.

        The small ones are written beside the large one, and flushed behind it: what makes that one
        durable does most of it for them, too.
        """
        small: list[int] = []
        values = self.saved.values

        def write_small() -> None:
            for name, data in self._small_files(temporary, sums, values):
                small.append(files.create(temporary / name))
                files.write(small[-1], 0, data)

        written: list[Future[None]] = []
        with ThreadPoolExecutor(1, "checkpoint-small") as thread:

            def begin_small() -> None:
                written.append(thread.submit(write_small))

            try:
                write_rank_file(temporary, self.saved, copies, begin_small)
                for each in written:
                    each.result()
                for file in small:
                    files.flush(file)
            finally:
                wait(written)
                for file in small:
                    files.close(file)

    def _small_files(
        self, temporary: Path, sums: dict[str, int], values: dict[str, bytes]
    ) -> Iterator[tuple[str, bytes]]:
        """``(name, bytes)`` of each that this rank writes beside its tensors."""
        yield own_name(self.saved.rank), self.own
        if self.saved.rank == 0:
            plan = self.saved.plan
            data = self.saved.metadata(temporary.name.rpartition("-")[2])
            yield METADATA, data
            sizes = {plan.file_name(rank): size for rank, size in enumerate(plan.file_nbytes)}
            sums = {**sums, METADATA: crc32(data)}
            listed = {key: crc32(value) for key, value in values.items()}
            yield checksums.NAME, Sums(sizes, sums, listed).text()

    def _commit(self, temporary: Path) -> None:
        """Gives the folder its name, when all ranks have flushed their files."""
        plan = self.saved.plan
        for rank, size in enumerate(plan.file_nbytes):
            path = temporary / plan.file_name(rank)
            found = path.stat().st_size
            if found != size:
                raise OSError(f"{path} has {found} bytes, expected {size}")
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
            with waiting(group, "save of a checkpoint"):
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
