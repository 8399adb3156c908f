"""Measures the disk alone in several ways; the fastest one is the disk's rate."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

_MIB = 1 << 20


def filled_memory(nbytes: int) -> mmap.mmap:
    """Allocates a multiple of 16 MiB, aligned to a page as O_DIRECT needs."""
    memory = mmap.mmap(-1, nbytes // (16 * _MIB) * (16 * _MIB))
    for begin in range(0, len(memory), _MIB):
        memory[begin : begin + _MIB] = os.urandom(64) * (_MIB // 64)
    return memory


@dataclass(frozen=True)
class Way:
    """A way in which a rank writes and reads its part of the bytes.

    Attributes:
        block_mib: MiB of a call.
        threads: calls in flight at a time.
        is_direct: whether calls bypass the page cache (O_DIRECT).
        into_new: whether each load reads two thirds, the part of the optimizer's states, into new
            memory, as a load that resumes training does.
    """

    block_mib: int
    threads: int
    is_direct: bool = False
    into_new: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        path = "O_DIRECT" if self.is_direct else "page cache"
        end = ", states in new memory" if self.into_new else ""
        return f"disk: {path}, {self.block_mib} MiB x {self.threads}{end}"


WAYS = (Way(1, 1), Way(4, 1), Way(4, 2), Way(16, 4, is_direct=True))
WAYS_INTO_NEW = (Way(4, 1, into_new=True),)


class RawDisk:
    """A file with this rank's part of the bytes."""

    def __init__(self, way: Way, memory: mmap.mmap) -> None:
        self._way, self._memory = way, memory
        self._new: np.ndarray[Any, Any] | None = None
        self._pool = ThreadPoolExecutor(way.threads)

    def save(self, folder: Path) -> None:
        """Writes the file and flushes it."""
        folder.mkdir(exist_ok=True)
        file = self._open(folder, os.O_WRONLY | os.O_CREAT)
        memory = memoryview(self._memory)
        self._in_blocks(memory, 0, lambda begin, block: os.pwrite(file, block, begin))
        os.fsync(file)
        os.close(file)

    def forget(self) -> None:
        """Frees the new memory of a load."""
        self._new = None

    def load(self, folder: Path) -> None:
        """Reads the file into existing memory, and a part into new memory if the way says so."""
        file = self._open(folder, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for begin, memory in self._targets():
            self._in_blocks(memory, begin, lambda begin, block: os.preadv(file, [block], begin))
        os.close(file)

    def _targets(self) -> list[tuple[int, memoryview]]:
        """Returns memory for parts of the file, with their offsets in it."""
        memory = memoryview(self._memory)
        if not self._way.into_new:
            return [(0, memory)]
        there = len(memory) // 3 // (16 * _MIB) * (16 * _MIB)
        self._new = np.empty(len(memory) - there, np.uint8)
        return [(0, memory[:there]), (there, memoryview(self._new))]

    def _open(self, folder: Path, flags: int) -> int:
        flags |= os.O_DIRECT if self._way.is_direct else 0
        return os.open(folder / f"{dist.get_rank()}", flags, 0o666)

    def _in_blocks(
        self, memory: memoryview, first: int, call: Callable[[int, memoryview], int]
    ) -> None:
        size = self._way.block_mib * _MIB

        def one(begin: int) -> None:
            if call(first + begin, memory[begin : begin + size]) != size:
                raise OSError(f"the disk took or gave less than {size} bytes")

        list(self._pool.map(one, range(0, len(memory), size)))  # raises the errors of calls
