"""``checksums.json``: the size of each file of a folder, and a CRC-32 of each block of it.

Checkpoints and safetensors folders have the same list. Other readers leave it alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from zerocore._C import BLOCK_NBYTES, FileStream, StreamWay
from zerocore.checkpoint import safe_files
from zerocore.checkpoint.byte_ranges import num_threads

NAME = "checksums.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
MAX_SMALL_NBYTES = 1 << 30  # of a read at once
DAMAGED = "is damaged: checksum mismatch: the file changed after it was written"
_STEP = 64  # blocks, after which progress is told
KeysIn = Callable[[list[range]], list[str]]


@dataclass(frozen=True)
class FileSums:
    """The size of a file, and the CRC-32 of each block."""

    nbytes: int
    crcs: list[int]

    @staticmethod
    def of(data: bytes) -> FileSums:
        blocks = range(0, len(data), BLOCK_NBYTES)
        return FileSums(len(data), [crc32(data[at : at + BLOCK_NBYTES]) for at in blocks])

    def check(
        self, path: Path, first: int, found: Sequence[int], keys_in: KeysIn = lambda ranges: []
    ) -> None:
        """Compares the sums of blocks from the ``first`` on; a ValueError names the file and
        ``keys_in`` what has changed."""
        bad = [
            range((first + index) * BLOCK_NBYTES, (first + index + 1) * BLOCK_NBYTES)
            for index, crc in enumerate(found)
            if [crc] != self.crcs[first + index : first + index + 1]
        ]
        if bad:
            keys = ", ".join(map(safe_files.shown, keys_in(bad)[:5]))
            raise ValueError(f"{path} {DAMAGED}{keys and f', in {keys}'}")


class Checksums(dict[str, FileSums]):
    """The list of a folder, by the names of files."""

    def text(self) -> bytes:
        """The list as a file, which ends with its own checksum."""
        facts = {
            name: {"nbytes": sums.nbytes, "crc32": "".join(f"{crc:08x}" for crc in sums.crcs)}
            for name, sums in self.items()
        }
        text = json.dumps({"block_nbytes": BLOCK_NBYTES, "files": facts}, indent=1)
        return f"{text}\n{crc32(text.encode()):08x}\n".encode()


def read_sums(folder: Path) -> Checksums | None:
    """The list of a folder, None if it has none; raises ValueError if it is broken."""
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
        return Checksums({name: _parsed(name, each) for name, each in facts["files"].items()})


def _parsed(name: str, facts: Mapping[str, Any]) -> FileSums:
    if not safe_files.is_plain_name(name):
        raise ValueError(f"{safe_files.shown(name)} is no name of a file in this folder")
    nbytes, digits = facts["nbytes"], bytes.fromhex(facts["crc32"])
    if not safe_files.is_count(nbytes) or len(digits) != 4 * -(-nbytes // BLOCK_NBYTES):
        raise ValueError(f"{safe_files.shown(name)} has a checksum too many or too few")
    starts = range(0, len(digits), 4)
    return FileSums(nbytes, [int.from_bytes(digits[at : at + 4], "big") for at in starts])


def read_range(path: Path, sums: FileSums | None, offset: int, nbytes: int) -> bytes:
    """Bytes of a file from ``offset`` on, fewer at its end; their blocks are compared with its
    ``sums``, if there are any. A ValueError names the file."""
    if nbytes > MAX_SMALL_NBYTES:
        raise ValueError(f"{path}: {nbytes} bytes at once are more than such a part needs")
    with safe_files.opened(path) as file:
        if sums is None:
            return os.pread(file.fileno(), nbytes, offset)
        first, end = offset // BLOCK_NBYTES, -(-(offset + nbytes) // BLOCK_NBYTES)
        begin = first * BLOCK_NBYTES
        data = os.pread(file.fileno(), end * BLOCK_NBYTES - begin, begin)
    sums.check(path, first, FileSums.of(data).crcs)
    return data[offset - begin :][:nbytes]


def read_checked(path: Path, sums: Checksums | None, most_nbytes: int = MAX_SMALL_NBYTES) -> bytes:
    """All bytes of a small file, compared with the list if there is one; a ValueError names it."""
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
    """Compares the ``part``-th of ``parts`` equal parts of the blocks of some files. A ValueError
    names a file that has changed, and with ``keys_in`` keys; ``advance`` is told of bytes."""
    total = sum(len(each.crcs) for each in sums.values())
    begin, end, done = total * part // parts, total * (part + 1) // parts, 0
    for name, each in sums.items():
        first, last = max(begin - done, 0), min(end - done, len(each.crcs))
        done += len(each.crcs)
        if (first < last or part == 0) and safe_files.size_of(folder / name) != each.nbytes:
            raise ValueError(f"{folder / name} has not the {each.nbytes} bytes that it had")
        for at in range(first, last, _STEP):
            stop = min(at + _STEP, last)
            stream = FileStream(str(folder / name), 0, num_threads(), way, at, stop)
            each.check(folder / name, at, stream.read(), partial(keys_in, name))
            advance(min(stop * BLOCK_NBYTES, each.nbytes) - at * BLOCK_NBYTES)
