"""What a checkpoint's small files say, each read once: metadata, sizes and checksums.

Each chunk is a zip file with a checksum, which ``torch.load`` does not compare. Those that zerocore
writes have one of every bit, the frame's too.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerocore.checkpoint.checksums import MAX_SMALL_NBYTES, METADATA, NAME, Sums, read_sums
from zerocore.checkpoint.safe_files import named, read_small, shown, size_of
from zerocore.checkpoint.safe_metadata import read_metadata
from zerocore.checkpoint.safe_pickles import check_stored
from zerocore.checkpoint.save_plan import FORMAT
from zerocore.checkpoint.torch_chunks import is_intact


@dataclass(frozen=True)
class Stored:
    """One chunk of a tensor, or a plain value, in a file.

    Attributes:
        key: of the state.
        offset, length: bytes in the file.
        data_nbytes: of the tensor's memory, where zerocore framed it.
        crc: of a plain value, where zerocore wrote it.
    """

    key: str
    offset: int
    length: int
    data_nbytes: int | None = None
    crc: int | None = None

    def is_good(self, file: Any) -> bool:
        """Whether the open file holds what was written."""
        if self.data_nbytes is not None:
            return is_intact(file.fileno(), self.offset, self.data_nbytes)
        if self.crc is not None:
            return crc32(os.pread(file.fileno(), self.length, self.offset)) == self.crc
        try:
            part = io.BufferedReader(Part(file, self.offset, self.length))
            check_stored(part, self.length)
            with zipfile.ZipFile(part) as chunk:
                return chunk.testzip() is None
        except Exception:  # a zip that is not one any more fails in many ways
            return False


class Contents:
    """What lies in the files of a checkpoint.

    Attributes:
        folder: of the checkpoint.
        metadata: as torch knows it.
        sums: the list of the files, if there is one, as where zerocore wrote them.
        is_ours: whether zerocore wrote the files, of which it knows more than of torch's.

    Raises:
        FileNotFoundError: there is no metadata.
        ValueError: a small file is broken; names it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has no {METADATA}: no checkpoint, or an unfinished one"
            )
        self.folder = folder
        self.sums = read_sums(folder)
        data = (
            read_small(path, MAX_SMALL_NBYTES) if self.sums is None else self.sums.check_whole(path)
        )
        with named(path):
            self.metadata: Metadata = read_metadata(data)
        save_id = getattr(self.metadata.storage_meta, "save_id", None)
        self.is_ours = isinstance(save_id, str) and save_id.startswith(FORMAT)
        if self.is_ours and self.sums is None:
            raise ValueError(f"{folder / NAME} is missing")

    @cached_property
    def files(self) -> dict[str, list[Stored]]:
        """What lies in each file."""
        sums = self._sums_of_ours
        sizes = {} if sums is None else _data_sizes(self.metadata)
        parts: dict[str, list[Stored]] = defaultdict(list)
        for index, info in self.metadata.storage_data.items():
            key = index.fqn
            crc = None if sums is None else sums.values.get(key)
            nbytes = sizes.get((key, index.offset))
            parts[info.relative_path].append(Stored(key, info.offset, info.length, nbytes, crc))
        return dict(parts)

    @property
    def _sums_of_ours(self) -> Sums | None:
        return self.sums if self.is_ours else None

    def check_sizes(self) -> None:
        """Compares the sizes of all files.

        Raises:
            ValueError: a file has not the size that it should have, or two chunks have bytes in
                common; names file and key.
        """
        for name, items in self.files.items():
            _check_size(self.folder / name, items, self._sums_of_ours)

    def check_wholes(self) -> None:
        """Compares the checksums of the small files, where zerocore wrote them.

        Raises:
            ValueError: bytes have changed; names the file.
        """
        if self.sums is not None:
            for name in self.sums.wholes:
                self.sums.check_whole(self.folder / name)


def _data_sizes(metadata: Metadata) -> dict[tuple[str, Any], int]:
    return {
        (key, chunk.offsets): facts.properties.dtype.itemsize * prod(chunk.sizes)
        for key, facts in metadata.state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
        for chunk in facts.chunks
    }


def _check_size(path: Path, items: list[Stored], sums: Sums | None) -> None:
    size = size_of(path) if path.exists() else -1
    last = None
    for item in sorted(items, key=lambda item: item.offset):
        end = item.offset + item.length
        if end > size:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise ValueError(
                f"{path} {found}, but {shown(item.key)} lies at bytes {item.offset}:{end}"
            )
        if last is not None and item.offset < last.offset + last.length:
            raise ValueError(f"{path}: {shown(last.key)} and {shown(item.key)} overlap")
        last = item
    if sums is not None and sums.sizes.get(path.name) != size:
        raise ValueError(f"{path} has {size} bytes, expected {sums.sizes.get(path.name)}")


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
