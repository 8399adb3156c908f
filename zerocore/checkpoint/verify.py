"""Compares the checksums of every byte of a checkpoint, with one thread or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from zerocore.checkpoint.contents import Contents, Stored
from zerocore.checkpoint.io_threads import in_threads
from zerocore.checkpoint.safe_files import opened, shown


def verify(contents: Contents, part: int = 0, parts: int = 1) -> None:
    """Compares the checksums of the ``part``-th of ``parts`` equal parts of a checkpoint's bytes.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    files = sorted(contents.files.items())
    total = sum(item.length for _, items in files for item in items)
    begin, end = total * part // parts, total * (part + 1) // parts
    done = 0
    for name, items in files:
        chosen = []
        for item in sorted(items, key=lambda item: item.offset):
            if begin <= done < end:
                chosen.append(item)
            done += item.length
        check_sums(contents.folder, name, chosen)
    if part == 0:
        contents.check_wholes()


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
    with opened(folder / name) as file:
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
        f"{path} is damaged: the checksum of {', '.join(map(shown, keys[:5]))} "
        "is another one than when it was written"
    )
