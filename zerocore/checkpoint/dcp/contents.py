"""The small files of a checkpoint, each read once: metadata, sizes and checksums."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from zerocore._C import StreamWay
from zerocore.checkpoint import checksums
from zerocore.checkpoint.byte_ranges import in_threads
from zerocore.checkpoint.dcp.safe_metadata import read_metadata
from zerocore.checkpoint.dcp.save_plan import FORMAT
from zerocore.checkpoint.safe_files import named, opened, shown, size_of
from zerocore.checkpoint.safe_pickles import check_stored


class Stored(NamedTuple):
    """One chunk of a tensor, or a plain value, of a key of the state: its bytes in a file."""

    key: str
    begin: int
    end: int

    def is_good(self, file: Any) -> bool:
        """Whether the chunk has the checksums of ``torch.save``; its frame has none."""
        nbytes = self.end - self.begin
        try:
            part = io.BufferedReader(Part(file, self.begin, nbytes))
            with zipfile.ZipFile(part) as chunk:
                check_stored(chunk, nbytes)
                return chunk.testzip() is None
        except Exception:  # a damaged zip file fails in many ways
            return False


class Contents:
    """The contents of the files of a checkpoint.

    Attributes:
        folder: of the checkpoint.
        metadata: as torch knows it.
        sums: checksums of all files, if there are any, as where zerocore wrote them.
        is_ours: whether zerocore wrote the files, of which it knows more than of torch's.

    Raises:
        FileNotFoundError: there is no metadata.
        ValueError: a small file is broken; names it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / checksums.METADATA
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has no {checksums.METADATA}: no checkpoint, or an unfinished one"
            )
        self.folder = folder
        self.sums = checksums.read_sums(folder)
        data = checksums.read_checked(path, self.sums)
        with named(path):
            self.metadata: Metadata = read_metadata(data)
        save_id = getattr(self.metadata.storage_meta, "save_id", None)
        self.is_ours = save_id == FORMAT
        if self.is_ours and self.sums is None:
            raise ValueError(f"{folder / checksums.NAME} is missing")

    @cached_property
    def files(self) -> dict[str, list[Stored]]:
        """The items of each file, in the order in it."""
        parts: dict[str, list[Stored]] = defaultdict(list)
        for index, info in self.metadata.storage_data.items():
            item = Stored(index.fqn, info.offset, info.offset + info.length)
            parts[info.relative_path].append(item)
        return {name: sorted(items, key=lambda item: item.begin) for name, items in parts.items()}

    def sums_of(self, name: str) -> checksums.FileSums | None:
        """The checksums of a file, if the folder has any; ValueError if this one has none."""
        if self.sums is not None and name not in self.sums:
            raise ValueError(f"{self.folder / name} is not in {checksums.NAME}")
        return None if self.sums is None else self.sums[name]

    def keys_in(self, name: str, ranges: list[range]) -> list[str]:
        """The keys in ranges of bytes of a file; the damaged ones if their chunks tell."""
        items = [
            item
            for item in self.files.get(name, ())
            if any(item.begin < each.stop and each.start < item.end for each in ranges)
        ]
        with opened(self.folder / name) as file:
            damaged = [item.key for item in items if not item.is_good(file)]
        return damaged or [item.key for item in items]

    def check_sizes(self) -> None:
        """Raises ValueError with file and key if a size is wrong, or two chunks overlap."""
        for name, items in self.files.items():
            _check_size(self.folder / name, items, self.sums_of(name))

    def verify(
        self,
        part: int = 0,
        parts: int = 1,
        way: StreamWay = StreamWay.ANY,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Compares the checksums of a part of all bytes, as ``check_files``. Torch's files have
        checksums in their chunks alone, all of which the first part compares."""
        if self.sums is not None:
            sums = dict(sorted(self.sums.items()))
            checksums.check_files(self.folder, sums, part, parts, way, self.keys_in, advance)
            return
        for name, items in self.files.items() if part == 0 else ():
            path = self.folder / name
            with opened(path) as file:
                found = in_threads(partial(Stored.is_good, file=file), items)
                for item, is_good in zip(items, found, strict=True):
                    if not is_good:
                        raise ValueError(f"{path} {checksums.DAMAGED} in {shown(item.key)}")
                    advance(item.end - item.begin)


def _check_size(path: Path, items: list[Stored], sums: checksums.FileSums | None) -> None:
    size = size_of(path) if path.exists() else -1
    last = None
    for item in items:
        if item.end > size:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise ValueError(
                f"{path} {found}, but {shown(item.key)} lies at bytes {item.begin}:{item.end}"
            )
        if last is not None and item.begin < last.end:
            raise ValueError(f"{path}: {shown(last.key)} and {shown(item.key)} overlap")
        last = item
    if sums is not None and sums.nbytes != size:
        raise ValueError(f"{path} has {size} bytes, expected {sums.nbytes}")


class Part(io.RawIOBase):
    """Some bytes of a file, as a file; several threads may have one each of the same file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._length - self._at))
        data = os.pread(self._file.fileno(), count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
