"""Opens and parses untrusted files: plain names, regular files, bounded sizes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

_MAX_TEXT_NBYTES = 100_000_000  # the most bytes of JSON, as in safetensors itself
_MAX_COUNT = 1 << 63
_SHOWN = 300  # the most characters of a file's content in a message


def opened(path: Path) -> FileIO:
    """Opens a regular file for reading. Raises FileNotFoundError, or ValueError for a pipe or a
    device, without waiting for it.

    It follows symbolic links: Hugging Face's cache consists of them, and only a user who may write
    to the folder can make one.
    """

    def open_regular(name: str, flags: int) -> int:
        try:
            file = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ValueError(f"{path} is not a regular file")
        return file

    return FileIO(path, "r", opener=open_regular)


def size_of(path: Path) -> int:
    """Returns the size of a regular file; raises as :func:`opened` does."""
    with opened(path) as file:
        return os.fstat(file.fileno()).st_size


def read_small(path: Path, most_nbytes: int = _MAX_TEXT_NBYTES) -> bytes:
    """Reads a whole file; raises as :func:`opened` does, and ValueError if it is larger."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_nbytes:
            raise ValueError(f"{path} has {size} bytes, more than such a file can need")
        return file.read(size)


def is_plain_name(name: Any) -> bool:
    """Whether a name is that of a file in its folder, not a path that leads elsewhere."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", ".."):
        return False
    return not {"/", "\\"} & set(name) and len(name.encode()) < 256


def is_count(value: Any) -> bool:
    """Whether a value is an integer that a size or an offset may have."""
    return type(value) is int and 0 <= value < _MAX_COUNT


def numel_of(shape: Sequence[int]) -> int:
    """Returns the product of sizes, in linear time; ValueError if it is too large for a tensor."""
    numel = 1
    for size in shape:
        numel *= size
        if numel >= _MAX_COUNT:
            raise ValueError(f"a shape of {len(shape)} dimensions has too many elements")
    return numel


def shown(value: Any, depth: int = 2) -> str:
    """Returns a value of a file as printable, short text for a message."""
    if isinstance(value, str):
        value = repr(value[: _SHOWN + 1])
    elif isinstance(value, Sequence) and depth > 0 and len(value) <= 12:
        inner = ", ".join(shown(item, depth - 1) for item in value)
        end = "," if isinstance(value, tuple) and len(value) == 1 else ""
        value = f"({inner}{end})" if isinstance(value, tuple) else f"[{inner}]"
    elif isinstance(value, Sequence) and depth > 0:
        inner = ", ".join(shown(item, depth - 1) for item in value[:5])
        return f"[{inner}, ... {len(value)} in all]"
    elif not isinstance(value, int | float | None):
        return f"a {type(value).__name__}"
    return _cut(f"{value}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@contextmanager
def named(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Adds the file's name to any error in the block. An OSError stays one; any other becomes a
    ValueError, because a damaged file fails in many ways."""
    try:
        yield
    except OSError as error:
        if f"{path}" in f"{error}":
            raise
        raise OSError(f"{path} {what}: {error}") from error
    except Exception as error:
        text = f"{error}" if isinstance(error, ValueError) else f"{error!r}"
        raise ValueError(f"{path} {what}: {_cut(text)}") from error


def parsed_json(data: bytes) -> Any:
    """Parses JSON; raises ValueError for a repeated name, a number out of range or NaN."""
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_int=_whole
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a name occurs twice")
    "".join(items).encode()  # raises for unpaired surrogates
    return items


def _whole(text: str) -> int:
    if text[0] == "-" or len(text) > 20:
        _refuse(text)
    return int(text)


def _refuse(text: str) -> None:
    raise ValueError(f"the number {shown(text)} is out of range")
