"""Reads pickles, and runs nothing of them: no class is handed out, and no attribute is set.

Python's unpickler gives names of a list the classes behind them, whose attributes a pickle can then
set for the whole process; a few bytes make it take any memory, and a key of nested tuples takes it
for ever. Here a name stands for a maker that checks what it is given.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zerocore._C import read_pickle as _read_pickle


class _Opaque:
    """Stands for what ``torch.load`` will make, or refuse."""


@dataclass(frozen=True, eq=False)
class Maker:
    """Stands for a class or a function that a pickle names."""

    call: Callable[..., Any] | None = None  # makes a value of arguments, which it checks
    kind: type | None = None  # of an object that is made empty, and filled by ``build`` once
    build: Callable[[Any, Any], None] | None = None  # checks a state and gives it to the object


def read_pickle(
    data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The value of a pickle of protocol 2 to 5; ValueError if it is broken, or of other opcodes.
    ``find`` gives the maker, or plain value, that a name stands for, ``persistent`` that of an
    id."""
    try:
        return _read_pickle(data, find, persistent, Maker, _Opaque)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is no pickle of a checkpoint: {error!r}"[:200]) from error


_ANY = Maker(call=lambda *args: _Opaque(), kind=_Opaque)


def _no_room(*args: Any) -> _Opaque:
    """Of ``bytearray``, which a number would give so many bytes."""
    if any(isinstance(arg, int) for arg in args):
        raise ValueError("it asks for memory that nothing fills")
    return _Opaque()


def _find_any(module: str, name: str) -> Maker:
    return Maker(call=_no_room) if name == "bytearray" else _ANY


def check_stored(file: zipfile.ZipFile, nbytes: int) -> None:
    """Raises ValueError if parts of a file of ``torch.save`` are packed or overlap."""
    listed = file.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in listed):
        raise ValueError("its parts are packed, which torch.save does not do")
    if sum(part.file_size for part in listed) > nbytes:
        raise ValueError("its parts overlap")


def load_plain(file: io.IOBase, nbytes: int) -> Any:
    """Plain values and tensors of ``torch.save``, on the CPU; damaged files fail in many ways."""
    buffered: Any = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
    with zipfile.ZipFile(buffered) as parts:
        check_stored(parts, nbytes)
        for name in parts.namelist():
            if name.endswith("/data.pkl"):
                read_pickle(parts.read(name), _find_any, lambda pid: _Opaque())
    buffered.seek(0)
    return torch.load(buffered, map_location="cpu", weights_only=True)
