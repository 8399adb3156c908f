"""The list of a checkpoint's files with their sizes, and checksums of what has none inside.

Chunks of tensors have theirs in their frames. Torch's readers do not look at the list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from zerocore.checkpoint.safe_files import (
    is_count,
    is_plain_name,
    named,
    parsed_json,
    read_small,
    shown,
)

NAME = "checksums.json"
METADATA = ".metadata"
MAX_SMALL_NBYTES = 1 << 30  # of a file that is read whole
_DAMAGED = "is damaged: its checksum is another one than when it was written"


@dataclass(frozen=True)
class Sums:
    """What the list says.

    Attributes:
        sizes: bytes of each file of tensors.
        wholes: checksum of each small file.
        values: checksum of each plain value in the files of tensors, by key.
    """

    sizes: Mapping[str, int]
    wholes: Mapping[str, int]
    values: Mapping[str, int]

    def text(self) -> bytes:
        """The list as a file, which ends with its own checksum."""
        facts = {"files": dict(self.sizes), "crc32": dict(self.wholes), "values": dict(self.values)}
        text = json.dumps(facts, indent=1)
        return f"{text}\n{crc32(text.encode()):08x}\n".encode()

    def check_whole(self, path: Path) -> bytes:
        """The bytes of a small file.

        Raises:
            ValueError: it is missing or its bytes have changed; names it.
        """
        if not path.exists():
            raise ValueError(f"{path} is missing")
        data = read_small(path, MAX_SMALL_NBYTES)
        if crc32(data) != self.wholes.get(path.name):
            raise ValueError(f"{path} {_DAMAGED}")
        return data


def read_sums(folder: Path) -> Sums | None:
    """The list of a folder; None if it has none, as a checkpoint that torch wrote.

    Raises:
        ValueError: it is broken.
    """
    path = folder / NAME
    if not path.exists():
        return None
    data = read_small(path)
    text, mark, end = data[:-10], data[-10:-9], data[-9:]
    if mark != b"\n" or end != b"%08x\n" % crc32(text):
        raise ValueError(f"{path} {_DAMAGED}")
    with named(path):
        facts = parsed_json(text)
        lists = [facts["files"], facts["crc32"], facts["values"]]
        if not all(type(each) is dict and all(map(is_count, each.values())) for each in lists):
            raise ValueError("it is no list of sizes and checksums")
        for name in [*lists[0], *lists[1]]:
            if not is_plain_name(name):
                raise ValueError(f"{shown(name)} is no name of a file in this folder")
    return Sums(*lists)
