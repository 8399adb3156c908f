"""All calls with which checkpoints create, write, flush, rename and delete files.

Callers use them as attributes of this module, so that tests can count them and make them fail.
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

# Reserves disk space for a new file, if the system can; its bytes are then zeros.
reserve = _C.reserve
flush, rename, close = os.fsync, os.rename, os.close


def create(path: Path) -> int:
    """Opens a file that must not exist yet for writing; the caller closes it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def writer(file: int, nbytes: int, way: _C.StreamWay = _C.StreamWay.ANY) -> _C.FileWriter:
    """Returns a writer of large blocks; use ``CACHED`` if other processes write the file, too."""
    return _C.FileWriter(file, nbytes, way)


def write(file: _C.FileWriter, offset: int, data: Tensor | bytes, crc: int = 0) -> int:
    """Writes bytes, or a contiguous tensor on the CPU; returns the CRC-32 that continues ``crc``
    with them."""
    if isinstance(data, bytes):
        data = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, device="cpu")
        )
    return file.write(data, offset, crc)


def finish(file: _C.FileWriter) -> None:
    """Passes the writer's buffered bytes to the system."""
    file.finish()


def write_all(file: int, data: bytes) -> None:
    small = writer(file, len(data))
    write(small, 0, data)
    finish(small)


def write_file(path: Path, data: bytes) -> None:
    """Writes a new small file, durably."""
    file = create(path)
    try:
        write_all(file, data)
        flush(file)
    finally:
        close(file)


def memory_of(values: Tensor) -> memoryview:
    """Returns a view of the bytes of a contiguous tensor on the CPU; the view keeps it alive."""
    if values.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    array.owner = values
    return memoryview(array).cast("B")


def flush_path(path: Path) -> None:
    """Makes a closed file durable, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Makes a folder that must not exist yet, and its parents if need be."""
    path.mkdir(parents=True)


def delete_folder(path: Path, names: Iterable[str]) -> None:
    """Deletes files, then the folder, which must be empty; raises the first OSError at the end."""
    errors = []
    for name in names:
        try:
            (path / name).unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    path.rmdir()
