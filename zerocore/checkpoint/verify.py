"""Whether the files of a checkpoint hold what its metadata says: sizes, and every byte's CRC-32.

Each chunk is a zip file with a checksum, which ``torch.load`` does not compare.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerocore.checkpoint.safe_reader import SafeReader


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is broken.
    """
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"{folder} has no .metadata: no checkpoint, or an unfinished one")
    return SafeReader(folder).read_metadata()


def check_files(folder: Path, metadata: Metadata) -> dict[str, list[tuple[str, int, int]]]:
    """``(key, offset, length)`` of all that lies in each file.

    Raises:
        ValueError: a chunk is nowhere, or a file is shorter than it should be; names file and key.
    """
    parts: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        parts[info.relative_path].append((index.fqn, info.offset, info.length))
    _check_counts(folder, metadata)
    for name, items in parts.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        for key, offset, length in items:
            if offset + length > size:
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise ValueError(
                    f"{path} {found}, but '{key}' lies at bytes {offset}:{offset + length}"
                )
    return dict(parts)


def _check_counts(folder: Path, metadata: Metadata) -> None:
    counts: dict[str, int] = defaultdict(int)
    for index in metadata.storage_data:
        counts[index.fqn] += 1
    for key, facts in metadata.state_dict_metadata.items():
        expected = len(facts.chunks) if isinstance(facts, TensorStorageMetadata) else 1
        if counts[key] != expected:
            raise ValueError(
                f"{folder}/.metadata: '{key}' has {expected} pieces, of which {counts[key]} were "
                "written"
            )


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

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
        self._file.seek(self._offset + self._at)
        data = self._file.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def damaged(folder: Path, name: str, items: list[tuple[str, int, int]]) -> Iterator[str]:
    """The keys in one file whose bytes have changed since they were written."""
    with open(folder / name, "rb") as file:
        for key, offset, length in items:
            try:
                with zipfile.ZipFile(io.BufferedReader(_Part(file, offset, length))) as chunk:
                    is_good = chunk.testzip() is None
            except Exception:  # a zip that is not one any more fails in many ways
                is_good = False
            if not is_good:
                yield key


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compares the checksums of every ``parts``-th file of a checkpoint.

    Raises:
        FileNotFoundError, ValueError: as above, or bytes have changed; names file and keys.
    """
    found = sorted(check_files(folder, read_metadata(folder)).items())
    for name, items in found[part::parts]:
        check_sums(folder, name, items)


def check_sums(folder: Path, name: str, items: list[tuple[str, int, int]]) -> None:
    """Compares the checksums of one file.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    keys = list(damaged(folder, name, items))
    if keys:
        raise ValueError(
            f"{folder / name} is damaged: the checksum of {', '.join(map(repr, keys[:5]))} "
            "is another one than when it was written"
        )
