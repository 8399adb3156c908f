"""Bytes of files to and from the memory of tensors, at given places, cast in small pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from zerocore._C import FileWriter
from zerocore.checkpoint.commit import files

_PIECE_NUMEL = 1 << 20  # what is cast, or copied from another device, at a time


def read_into(file: int, offset: int, dtype: torch.dtype, values: Tensor) -> None:
    """Reads ``values.numel()`` elements of ``dtype`` from byte ``offset`` into ``values``.

    Args:
        values: plain, 1-D and contiguous, of any dtype and device.

    Raises:
        OSError: the file ends before.
    """
    if dtype == values.dtype and values.device.type == "cpu":
        _read(file, offset, values)
        values[:0].zero_()  # the version counter does not see what is read
        return
    for begin, piece in _pieces(values):
        buffer = torch.empty(piece.numel(), dtype=dtype)
        _read(file, offset + begin * dtype.itemsize, buffer)
        piece.copy_(buffer)


def write_from(file: FileWriter, offset: int, dtype: torch.dtype, values: Tensor) -> None:
    """Writes ``values`` (plain, 1-D, contiguous) as ``dtype``."""
    for begin, piece in _pieces(values):
        data = piece.to("cpu", dtype).contiguous()
        files.write(file, offset + begin * dtype.itemsize, data)


def _pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, values.numel(), _PIECE_NUMEL):
        yield begin, values[begin : begin + _PIECE_NUMEL]


def _read(file: int, offset: int, values: Tensor) -> None:
    data = files.memory_of(values)
    while data:
        count = os.preadv(file, [data], offset)
        if count == 0:
            raise OSError(f"the file ends {len(data)} bytes before the tensor does")
        data, offset = data[count:], offset + count
