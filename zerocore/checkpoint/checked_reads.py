"""Reads files of a checkpoint, and compares their bytes with the checksums of its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from zerocore._C import BLOCK_NBYTES, FileStream, StreamWay
from zerocore.checkpoint import safe_files
from zerocore.checkpoint.byte_ranges import num_threads
from zerocore.checkpoint.checksums import NAME, Checksums, DamagedError, FileSums

MAX_SMALL_NBYTES = 1 << 30  # the most bytes of one read
DAMAGED = "is damaged: checksum mismatch: the file changed after it was written"
_STEP = 64  # blocks between two reports of progress
KeysIn = Callable[[list[range]], list[str]]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors in the block into a :class:`DamagedError` with the file's name."""
    try:
        yield
    except (OSError, ValueError) as error:
        is_named = str(path) in str(error)
        raise DamagedError(f"{error}" if is_named else f"{path} cannot be read: {error}") from error


def check_blocks(
    path: Path,
    sums: FileSums,
    first: int,
    actual: Sequence[int],
    keys_in: KeysIn = lambda ranges: [],
) -> None:
    """Compares the ``actual`` sums of a file's blocks from ``first`` on. Raises ValueError with the
    file and the keys that ``keys_in`` returns for the changed ranges."""
    bad = [
        range((first + index) * BLOCK_NBYTES, (first + index + 1) * BLOCK_NBYTES)
        for index, crc in enumerate(actual)
        if [crc] != sums.crcs[first + index : first + index + 1]
    ]
    if bad:
        keys = ", ".join(map(safe_files.shown, keys_in(bad)[:5]))
        raise ValueError(f"{path} {DAMAGED}{keys and f', in {keys}'}")


def read_sums(folder: Path) -> Checksums | None:
    """Reads a folder's checksums; None if it has none, ValueError if the list of them is broken."""
    path = folder / NAME
    if not path.exists():
        return None
    data = safe_files.read_small(path)
    text, mark, end = data[:-10], data[-10:-9], data[-9:]
    if mark != b"\n" or end != b"%08x\n" % crc32(text):
        raise ValueError(f"{path} {DAMAGED}")
    with safe_files.named(path):
        facts = safe_files.parsed_json(text)
        if type(facts) is not dict or facts.get("block_nbytes") != BLOCK_NBYTES:
            raise ValueError(
                f"it has no checksums of blocks of {BLOCK_NBYTES} bytes: another version wrote it"
            )
        return Checksums({name: _parsed(name, sums) for name, sums in facts["files"].items()})


def _parsed(name: str, facts: Mapping[str, Any]) -> FileSums:
    if not safe_files.is_plain_name(name):
        raise ValueError(f"{safe_files.shown(name)} is not the name of a file in this folder")
    nbytes, digits = facts["nbytes"], bytes.fromhex(facts["crc32"])
    if not safe_files.is_count(nbytes) or len(digits) != 4 * -(-nbytes // BLOCK_NBYTES):
        raise ValueError(f"{safe_files.shown(name)} has the wrong number of checksums")
    starts = range(0, len(digits), 4)
    return FileSums(nbytes, [int.from_bytes(digits[at : at + 4], "big") for at in starts])


def read_range(path: Path, sums: FileSums | None, offset: int, nbytes: int) -> bytes:
    """Reads bytes of a file from ``offset`` on, fewer at its end. Compares their blocks with its
    ``sums``, if there are any; a ValueError names the file."""
    if nbytes > MAX_SMALL_NBYTES:
        raise ValueError(f"{path}: a header or a plain value cannot have {nbytes} bytes")
    with safe_files.opened(path) as file:
        if sums is None:
            return os.pread(file.fileno(), nbytes, offset)
        first, end = offset // BLOCK_NBYTES, -(-(offset + nbytes) // BLOCK_NBYTES)
        begin = first * BLOCK_NBYTES
        data = os.pread(file.fileno(), end * BLOCK_NBYTES - begin, begin)
    check_blocks(path, sums, first, FileSums.of(data).crcs)
    return data[offset - begin :][:nbytes]


def read_checked(path: Path, sums: Checksums | None, most_nbytes: int = MAX_SMALL_NBYTES) -> bytes:
    """Reads a small file, and checks it if ``sums`` are given; a ValueError names the file."""
    data = safe_files.read_small(path, most_nbytes)
    if sums is not None and FileSums.of(data) != sums.get(path.name):
        raise ValueError(f"{path} {DAMAGED}")
    return data


def check_files(
    folder: Path,
    sums: Mapping[str, FileSums],
    part: int = 0,
    parts: int = 1,
    way: StreamWay = StreamWay.ANY,
    keys_in: Callable[[str, list[range]], list[str]] = lambda name, ranges: [],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Compares the ``part``-th of ``parts`` equal parts of the files' blocks. A ValueError names a
    changed file, and the keys of ``keys_in``. Calls ``advance`` with the bytes it has compared."""
    total = sum(len(file.crcs) for file in sums.values())
    begin, end, done = total * part // parts, total * (part + 1) // parts, 0
    for name, file in sums.items():
        path, first, last = folder / name, max(begin - done, 0), min(end - done, len(file.crcs))
        done += len(file.crcs)
        if (first < last or part == 0) and (size := safe_files.size_of(path)) != file.nbytes:
            raise ValueError(f"{path} has {size} bytes, expected {file.nbytes}")
        for at in range(first, last, _STEP):
            stop = min(at + _STEP, last)
            stream = FileStream(str(path), 0, num_threads(), way, at, stop)
            check_blocks(path, file, at, stream.read(), partial(keys_in, name))
            advance(min(stop * BLOCK_NBYTES, file.nbytes) - at * BLOCK_NBYTES)
