"""Files that fail, and a model of power loss: wraps the calls of checkpoint.commit.files."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocore.checkpoint.commit import files

CALLS = (
    "create",
    "reserve",
    "writer",
    "write",
    "finish",
    "flush",
    "close",
    "flush_path",
    "make_folder",
    "rename",
    "delete_folder",
)


def wrap(before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """``before`` is told of each call and its arguments, and may raise."""

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(files, name)

        def call(*args: Any) -> Any:
            before(name, args)
            return original(*args)

        return call

    for name in CALLS:
        setattr(files, name, wrapped(name))


@dataclass
class Count:
    """Counts the calls of this process; at the ``last`` one something happens."""

    last: int | None = None
    kinds: tuple[str, ...] = CALLS
    error: int | None = None  # an errno; None kills the process
    made: int = 0

    def start(self) -> None:
        """From now on."""
        wrap(self._note)

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in self.kinds:
            return
        self.made += 1
        if self.made == self.last:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.error, os.strerror(self.error))


def full_disk(last: int | None) -> Count:
    """The ``last`` write finds no room."""
    return Count(last, ("write",), errno.ENOSPC)


class _File:
    """The bytes of a file in the system, on the disk, and held back to be written."""

    def __init__(self) -> None:
        self.now = self.durable = b""
        self._held: list[tuple[int, bytes]] = []

    def hold(self, offset: int, data: bytes) -> None:
        self._held.append((offset, data))

    def finish(self) -> None:
        for offset, data in self._held:
            self.write(offset, data)
        self._held = []

    def write(self, offset: int, data: bytes) -> None:
        before = self.now[:offset].ljust(offset, b"\0")
        self.now = before + data + self.now[offset + len(data) :]


class _Folder:
    def __init__(self) -> None:
        self.now: dict[str, Any] = {}
        self.durable: dict[str, Any] = {}


@dataclass
class Recorder:
    """The calls of this process with what they returned, by when they ended.

    A writer is recorded as the file it was made of, and a write to it as ``hold``.
    """

    log: list[tuple[int, str, tuple[Any, ...], Any]] = field(default_factory=list)
    _writers: list[tuple[Any, int]] = field(default_factory=list)

    def start(self) -> None:
        """From now on."""
        for name in CALLS:
            setattr(files, name, self._recorded(name, getattr(files, name)))

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = original(*args)
            self.log.append((time.monotonic_ns(), *self._entry(name, args, result)))
            return result

        return call

    def _entry(
        self, name: str, args: tuple[Any, ...], result: Any
    ) -> tuple[str, tuple[Any, ...], Any]:
        """A call as it can be sent to another process."""
        if name == "writer":
            self._writers.append((result, args[0]))
            return name, args, None
        if name == "write":
            data = args[2]
            if isinstance(data, Tensor):
                data = bytes(data.contiguous().view(-1).view(torch.uint8).tolist())
            args = (*args[:2], data)
        for writer, file in self._writers:
            if writer is args[0]:
                return "hold" if name == "write" else name, (file, *args[1:]), result
        return name, args, result


class Disk:
    """The files that calls leave on a disk that loses power.

    Bytes of a file are sure to last when the file was flushed after they were written; names when
    their folder was flushed after they were made, changed or deleted. The rest may last or not.
    """

    def __init__(self) -> None:
        self.root = _Folder()
        self._open: dict[tuple[int, int], _File] = {}  # by rank and number

    def make(self, rank: int, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Carries out one call of a rank."""
        if name == "create":
            folder, file = self.root.now[args[0].parent.name], _File()
            folder.now[args[0].name] = self._open[rank, result] = file
        elif name == "reserve":
            file = self._open[rank, args[0]]
            file.now = file.now.ljust(args[1], b"\0")
        elif name == "write":
            self._open[rank, args[0]].write(*args[1:])
        elif name == "hold":
            self._open[rank, args[0]].hold(*args[1:])
        elif name == "finish":
            self._open[rank, args[0]].finish()
        elif name == "flush":
            self._open[rank, args[0]].durable = self._open[rank, args[0]].now
        elif name == "make_folder":
            self.root.now[args[0].name] = _Folder()
        elif name == "rename":
            self.root.now[args[1].name] = self.root.now.pop(args[0].name)
        elif name == "delete_folder":
            self.root.now.pop(args[0].name).now.clear()
        elif name == "flush_path":
            folder = self.root.now.get(args[0].name, self.root)
            folder.durable = dict(folder.now)

    def left(self, names: bool, inner: bool, data: bool) -> dict[str, dict[str, bytes]]:
        """Complete checkpoints after a loss of power, by folder and file.

        Args:
            names: whether names of folders last that were not flushed.
            inner: whether names of files in them do.
            data: whether bytes do.
        """
        root = self.root.now if names else self.root.durable
        found = {}
        for name, folder in root.items():
            entries = folder.now if inner else folder.durable
            if name[5:].isdigit() and ".metadata" in entries:
                found[name] = {key: f.now if data else f.durable for key, f in entries.items()}
        return found
