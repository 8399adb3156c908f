"""Every call by which checkpoints create, write, flush, rename and delete files.

Callers name them through this module, so that tests can count them and let them fail.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerocore import _C

# Takes the room of the bytes of a new file, where the system can; they are zeros then.
reserve = _C.reserve
flush, rename, close = os.fsync, os.rename, os.close


def create(path: Path) -> int:
    """Opens a file that must not exist yet for writing; the caller closes it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def writer(file: int, nbytes: int, way: _C.StreamWay = _C.StreamWay.ANY) -> _C.FileWriter:
    """Writes to a file in large blocks; ``CACHED`` where other processes write, too."""
    return _C.FileWriter(file, nbytes, way)


def write(file: _C.FileWriter, offset: int, data: Tensor | bytes, crc: int = 0) -> int:
    """Writes bytes, or a contiguous tensor on the CPU; returns the CRC-32 of what ``crc`` is that
    of, and of this."""
    if isinstance(data, bytes):
        data = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, device="cpu")
        )
    return file.write(data, offset, crc)


def finish(file: _C.FileWriter) -> None:
    """Hands all that was given to the system."""
    file.finish()


def write_all(file: int, data: bytes) -> None:
    small = writer(file, len(data))
    write(small, 0, data)
    finish(small)


def write_file(path: Path, data: bytes) -> None:
    """Makes a small file of its own, and makes it durable."""
    file = create(path)
    try:
        write_all(file, data)
        flush(file)
    finally:
        close(file)


def memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which lives as long as the view."""
    if values.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    array.owner = values
    return memoryview(array).cast("B")


def flush_path(path: Path) -> None:
    """Makes a closed file durable, or the names of files in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Makes a folder that must not exist yet; those above it may."""
    path.mkdir(parents=True)


def delete_folder(path: Path, names: Iterable[str]) -> None:
    """Deletes files, and the folder if that was all; raises the first OSError at the end."""
    errors = []
    for name in names:
        try:
            (path / name).unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    path.rmdir()
