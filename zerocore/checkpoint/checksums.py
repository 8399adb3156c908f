"""``checksums.json``: the size of each file of a folder, and a CRC-32 of each of its blocks.

Checkpoints and safetensors folders have the same list. Other readers ignore it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from zlib import crc32

from zerocore._C import BLOCK_NBYTES
from zerocore.common.agreement import SharedError

NAME = "checksums.json"
METADATA = ".metadata"  # file of torch.distributed.checkpoint


class DamagedError(SharedError):
    """The error of a checkpoint that cannot be read; an earlier one may be readable."""


@dataclass(frozen=True)
class FileSums:
    """The size of a file, and the CRC-32 of each block."""

    nbytes: int
    crcs: list[int]

    @staticmethod
    def of(data: bytes) -> FileSums:
        blocks = range(0, len(data), BLOCK_NBYTES)
        return FileSums(len(data), [crc32(data[at : at + BLOCK_NBYTES]) for at in blocks])


class Checksums(dict[str, FileSums]):
    """The list of a folder, by file name."""

    def text(self) -> bytes:
        """Returns the list as the bytes of a file, which ends with its own checksum."""
        facts = {
            name: {"nbytes": sums.nbytes, "crc32": "".join(f"{crc:08x}" for crc in sums.crcs)}
            for name, sums in self.items()
        }
        text = json.dumps({"block_nbytes": BLOCK_NBYTES, "files": facts}, indent=1)
        return f"{text}\n{crc32(text.encode()):08x}\n".encode()
