"""Whether the files of a checkpoint hold what its metadata says: sizes, and every byte's checksum.

Each chunk is a zip file with a checksum, which ``torch.load`` does not compare. Those that zerocore
writes have one of every bit, the frame's too.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerocore.checkpoint.checksums import NAME, Sums, read_sums
from zerocore.checkpoint.io_threads import in_threads
from zerocore.checkpoint.safe_reader import SafeReader
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
            with zipfile.ZipFile(io.BufferedReader(_Part(file, self.offset, self.length))) as chunk:
                return chunk.testzip() is None
        except Exception:  # a zip that is not one any more fails in many ways
            return False


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is broken.
    """
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"{folder} has no .metadata: no checkpoint, or an unfinished one")
    sums = read_sums(folder)
    if sums is not None:
        sums.check_whole(folder, ".metadata")
    metadata = SafeReader(folder).read_metadata()
    if sums is None and is_ours(metadata):
        raise ValueError(f"{folder / NAME} is missing")
    return metadata


def is_ours(metadata: Metadata) -> bool:
    """Whether zerocore wrote the files, of which it knows more than of torch's."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return isinstance(save_id, str) and save_id.startswith(FORMAT)


def check_files(folder: Path, metadata: Metadata) -> dict[str, list[Stored]]:
    """What lies in each file.

    Raises:
        ValueError: a chunk is nowhere, or a file has not the size that it should have; names file
            and key.
    """
    sums = read_sums(folder) if is_ours(metadata) else None
    sizes = _data_sizes(metadata) if sums is not None else {}
    parts: dict[str, list[Stored]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        crc = None if sums is None else sums.values.get(index.fqn)
        nbytes = sizes.get((index.fqn, index.offset))
        parts[info.relative_path].append(Stored(index.fqn, info.offset, info.length, nbytes, crc))
    _check_counts(folder, metadata)
    for name, items in parts.items():
        _check_size(folder / name, items, sums)
    return dict(parts)


def _data_sizes(metadata: Metadata) -> dict[tuple[str, Any], int]:
    return {
        (key, chunk.offsets): facts.properties.dtype.itemsize * prod(chunk.sizes)
        for key, facts in metadata.state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
        for chunk in facts.chunks
    }


def _check_size(path: Path, items: list[Stored], sums: Sums | None) -> None:
    size = path.stat().st_size if path.exists() else -1
    for item in items:
        end = item.offset + item.length
        if end > size:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise ValueError(f"{path} {found}, but '{item.key}' lies at bytes {item.offset}:{end}")
    if sums is not None and sums.sizes.get(path.name) != size:
        raise ValueError(f"{path} has {size} bytes, expected {sums.sizes.get(path.name)}")


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


def verify(folder: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Compares the checksums of the ``part``-th of ``parts`` equal parts of a checkpoint's bytes.

    Raises:
        FileNotFoundError, ValueError: as above, or bytes have changed; names file and keys.
    """
    files = sorted(check_files(folder, metadata).items())
    total = sum(item.length for _, items in files for item in items)
    begin, end = total * part // parts, total * (part + 1) // parts
    done = 0
    for name, items in files:
        chosen = []
        for item in sorted(items, key=lambda item: item.offset):
            if begin <= done < end:
                chosen.append(item)
            done += item.length
        check_sums(folder, name, chosen)
    if part == 0:
        check_wholes(folder)


def check_wholes(folder: Path) -> None:
    """Compares the checksums of the small files, where zerocore wrote them.

    Raises:
        ValueError: bytes have changed; names the file.
    """
    sums = read_sums(folder)
    if sums is not None:
        for name in sums.wholes:
            sums.check_whole(folder, name)


def check_sums(
    folder: Path,
    name: str,
    items: Iterable[Stored],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Compares the checksums of what lies in one file.

    Args:
        advance: is told of bytes.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    keys = []
    with open(folder / name, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # the system reads further ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        chosen = list(items)
        found = in_threads(lambda item: item.is_good(file), chosen)
        for item, was_good in zip(chosen, found, strict=True):
            if not was_good:
                keys.append(item.key)
            advance(item.length)
    if keys:
        raise damaged(folder / name, keys)


def damaged(path: Path, keys: Sequence[str]) -> ValueError:
    """What is said of a file in which the bytes of these keys have changed."""
    return ValueError(
        f"{path} is damaged: the checksum of {', '.join(map(repr, keys[:5]))} "
        "is another one than when it was written"
    )
