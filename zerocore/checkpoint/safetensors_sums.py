"""Checksums in the headers of safetensors files: of each tensor, and of the header itself.

They stand in its free metadata, which other readers leave alone. Their text has a length that is
known before the data is, so it is filled in when that is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

_KEY = "crc32"
_MARK = {"checksums": _KEY}  # so that a change of the key above is noticed
_WIDTH = 8  # digits of a checksum


def placeholder(count: int) -> dict[str, str]:
    """What the metadata of a file of so many tensors gets, without the checksums."""
    return {**_MARK, _KEY: "0" * _WIDTH * (count + 1)}


def filled(header: bytes, sums: Mapping[str, int]) -> bytes:
    """A header, its length included, with the checksums of the tensors and of itself."""
    blank = f'"{_KEY}":"{"0" * _WIDTH * (len(sums) + 1)}"'.encode()
    digits = "".join(f"{sums[name]:08x}" for name in sorted(sums))
    made = header.replace(blank, f'"{_KEY}":"{digits}{"0" * _WIDTH}"'.encode(), 1)
    own = f"{crc32(made):08x}".encode()
    end = made.index(blank[: len(_KEY) + 4]) + len(blank) - 1
    return made[: end - _WIDTH] + own + made[end:]


def is_marked(metadata: Mapping[str, Any]) -> bool:
    """Whether a file has checksums, or had them before it was changed."""
    return _KEY in metadata or any(key in metadata for key in _MARK)


def sums_of(header: bytes, metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """The checksum of each tensor.

    Args:
        header: as it stands in the file, its length included.

    Raises:
        ValueError: the header is not as it was written.
    """
    ordered, digits = sorted(names), metadata.get(_KEY, "")
    sums = [int(digits[at : at + _WIDTH], 16) for at in range(0, len(digits), _WIDTH)]
    if len(sums) == len(ordered) + 1 and metadata.items() >= _MARK.items():
        own = digits[-_WIDTH:].encode()
        place = header.index(digits.encode()) + len(digits)
        blank = header[: place - _WIDTH] + b"0" * _WIDTH + header[place:]
        if own == f"{crc32(blank):08x}".encode():
            return dict(zip(ordered, sums, strict=False))
    raise ValueError("it is damaged: its checksum is another one than when it was written")
