"""Compares the checksums of every byte of a checkpoint, with one thread or several."""

from __future__ import annotations

from collections.abc import Callable

from zerocore._C import StreamWay
from zerocore.checkpoint.checksums import check_files
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.io_threads import in_threads
from zerocore.checkpoint.safe_files import opened, shown


def verify(
    contents: Contents,
    part: int = 0,
    parts: int = 1,
    way: StreamWay = StreamWay.ANY,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Compares the checksums of the ``part``-th of ``parts`` equal parts of a checkpoint's bytes.

    Torch's files have checksums in their chunks alone, all of which the first part compares.

    Args:
        advance: is told of bytes.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    if contents.sums is not None:
        sums = dict(sorted(contents.sums.items()))
        check_files(contents.folder, sums, part, parts, way, contents.keys_in, advance)
        return
    for name, items in contents.files.items() if part == 0 else ():
        path = contents.folder / name
        with opened(path) as file:
            found = in_threads(lambda item: item.is_good(file), items)
            for item, is_good in zip(items, found, strict=True):
                if not is_good:
                    raise ValueError(f"{path} is damaged: checksum mismatch in {shown(item.key)}")
                advance(item.end - item.begin)
