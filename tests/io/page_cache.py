"""Files that are in the page cache or not, and whether a file system lets reads go past it."""

from __future__ import annotations

import os
from pathlib import Path

from zerocore._C import FileStream, StreamWay


def can_bypass_cache(folder: Path) -> bool:
    (folder / "probe").write_bytes(b"0")
    try:
        return FileStream(str(folder / "probe"), way=StreamWay.DIRECT).is_direct
    except OSError:
        return False


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
