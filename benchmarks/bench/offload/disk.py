"""Reads and writes of a disk file beside plain calls on the same file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lib.systems import import_zerocore
from zerocore._C import HostMemory

import_zerocore()  # and with it the tests, which have the file's binding
from tests.bindings._C_testing import DiskFile  # noqa: E402

MIB = 1 << 20
# MiB of a call, and how many are under way at a time.
RAW_WAYS = ((16, 4), (4, 8), (1, 16))
WHAT = ("write", "read", "read and write")


@dataclass(frozen=True)
class Request:
    """Bytes of the file and of memory that are to be moved."""

    writes: bool
    begin: int
    end: int


def requests_of(what: str, nbytes: int) -> list[Request]:
    """The whole file, or one half written while the other is read."""
    half = nbytes // 2
    if what == "read and write":
        return [Request(True, 0, half), Request(False, half, nbytes)]
    return [Request(what == "write", 0, nbytes)]


class Disk:
    """A file in `folder` and memory of its size."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = HostMemory(nbytes)
        memory.view(0, nbytes // 4, torch.int32).random_()
        self._memory = memory.view(0, nbytes, torch.uint8)
        self._bytes = memoryview(self._memory.numpy())
        self._file = DiskFile(str(folder), "benchmark", nbytes)
        self._move(requests_of("write", nbytes))  # space that was never written is slow

    def measure(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Seconds by what is done and how, one figure a round; all take their turn."""
        found: dict[str, dict[str, list[float]]] = {what: {} for what in WHAT}
        for _ in range(rounds):
            for what in WHAT:
                for name, call in self._ways():
                    start = time.perf_counter()
                    call(requests_of(what, self.nbytes))
                    found[what].setdefault(name, []).append(time.perf_counter() - start)
        return found

    @property
    def is_direct(self) -> bool:
        """Whether past the page cache."""
        return self._file.is_direct

    def _ways(self) -> Iterator[tuple[str, Callable[[list[Request]], None]]]:
        """A disk file's own, and plain calls on the same file."""
        yield "DiskFile", self._move
        for mib, calls in RAW_WAYS:
            with ThreadPoolExecutor(calls) as pool:
                yield f"raw: {mib} MiB x {calls}", self._raw_way(mib * MIB, pool)

    def _move(self, requests: list[Request]) -> None:
        tickets = []
        for request in requests:
            begin = self._file.write if request.writes else self._file.read
            memory = self._memory[request.begin : request.end]
            tickets.append(begin(request.begin, memory, "the benchmark"))
        for ticket in tickets:
            self._file.wait(ticket)

    def _raw_way(self, size: int, pool: ThreadPoolExecutor) -> Callable[[list[Request]], None]:
        def one(block: Request) -> None:
            memory = self._bytes[block.begin : block.end]
            if block.writes:
                count = os.pwrite(self._file.descriptor, memory, block.begin)
            else:
                count = os.preadv(self._file.descriptor, [memory], block.begin)
            if count != len(memory):
                raise OSError(f"the disk took or gave {count} of {len(memory)} bytes")

        def run(requests: list[Request]) -> None:
            blocks = [
                [Request(r.writes, b, min(b + size, r.end)) for b in range(r.begin, r.end, size)]
                for r in requests
            ]
            in_turns = [block for group in zip(*blocks, strict=True) for block in group]
            list(pool.map(one, in_turns))  # raises what one has raised

        return run
