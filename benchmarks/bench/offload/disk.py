"""Measures plain direct reads and writes of a file."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
# MiB of a call, and calls in flight at a time.
RAW_WAYS = ((16, 4), (4, 8), (1, 16))


class RawDisk:
    """An unlinked file in `folder`, and memory of the same size."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memoryview(mmap.mmap(-1, nbytes))  # begins on a page
        with tempfile.NamedTemporaryFile(dir=folder) as named:
            self._file = os.open(named.name, os.O_RDWR | os.O_DIRECT)
        self._move(True, *RAW_WAYS[0])  # the first write to new space is slow

    def close(self) -> None:
        """Closes and so deletes the file."""
        os.close(self._file)

    def measure(self, rounds: int) -> dict[str, float]:
        """Returns the bytes a second of "read" and "write" in the fastest way; medians."""
        found: dict[str, list[float]] = {"read": [], "write": []}
        for way in RAW_WAYS:
            for what, seconds in found.items():
                times = sorted(self._move(what == "write", *way) for _ in range(rounds))
                seconds.append(times[rounds // 2])
        return {what: self.nbytes / min(seconds) for what, seconds in found.items()}

    def _move(self, writes: bool, mib: int, calls: int) -> float:
        """Reads or writes the whole file; returns the seconds."""
        move: Callable[..., int] = os.pwritev if writes else os.preadv

        def one(begin: int) -> None:
            block = self._memory[begin : begin + mib * MIB]
            count = move(self._file, [block], begin)
            if count != len(block):
                raise OSError(f"the disk took or gave {count} of {len(block)} bytes")

        start = time.perf_counter()
        with ThreadPoolExecutor(calls) as pool:
            list(pool.map(one, range(0, self.nbytes, mib * MIB)))  # raises the errors of calls
        return time.perf_counter() - start
