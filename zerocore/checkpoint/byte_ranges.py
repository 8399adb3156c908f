"""Copies bytes between files and tensors in threads, and casts them in small pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from zerocore._C import FileWriter
from zerocore.checkpoint.commit import files
from zerocore.common.host import host_threads, local_ranks

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST = 8  # more than disks need: a thread moves about 2 GB/s through the page cache


def num_threads() -> int:
    """Returns this rank's share of the cores, from 2 to 8."""
    return min(_MOST, max(2, host_threads(local_ranks())))


def in_threads(call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the results of ``call`` for the items, in order; raises an item's error at its turn.

    ``call`` must release the interpreter while it reads or writes. Results end after all calls.
    """
    with ThreadPoolExecutor(num_threads(), "checkpoint-io") as pool:
        yield from pool.map(call, items)


_PIECE_NUMEL = 1 << 20  # elements that are cast, or copied from another device, at a time


def read_into(file: int, offset: int, dtype: torch.dtype, values: Tensor) -> None:
    """Reads ``values.numel()`` elements of ``dtype`` from byte ``offset``; OSError if there are
    fewer. ``values`` is plain, 1-D and contiguous, of any dtype and device."""
    if dtype == values.dtype and values.device.type == "cpu":
        _read(file, offset, values)
        values[:0].zero_()  # counts the write, which the read does not
        return
    for piece in values.split(_PIECE_NUMEL):
        buffer = torch.empty(piece.numel(), dtype=dtype, device="cpu")
        _read(file, offset, buffer)
        piece.copy_(buffer)
        offset += buffer.nbytes


def write_from(file: FileWriter, offset: int, dtype: torch.dtype, values: Tensor) -> None:
    """Writes ``values`` (plain, 1-D, contiguous) as ``dtype``."""
    for piece in values.split(_PIECE_NUMEL):
        data = piece.to("cpu", dtype).contiguous()
        files.write(file, offset, data)
        offset += data.nbytes


def _read(file: int, offset: int, values: Tensor) -> None:
    data = files.memory_of(values)
    while data:
        count = os.preadv(file, [data], offset)
        if count == 0:
            raise OSError(f"the file ends {len(data)} bytes before the tensor does")
        data, offset = data[count:], offset + count
