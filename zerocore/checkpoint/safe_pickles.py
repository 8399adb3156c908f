"""Reads pickles, and runs nothing of them: no class is handed out, and no attribute is set.

Python's unpickler gives names of a list the classes behind them, whose attributes a pickle can then
set for the whole process; a few bytes make it take any memory, and a key of nested tuples takes it
for ever. Here a name stands for a maker that checks what it is given.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (str, int, float, bool, bytes, type(None))
_KINDS = frozenset(_PLAIN)


class _Opaque:
    """Stands for what ``torch.load`` will make, or refuse."""


@dataclass(frozen=True, eq=False)
class Maker:
    """Stands for a class or a function that a pickle names.

    Attributes:
        call: makes a value of arguments, which it checks.
        kind: of an object that is made empty, and filled by ``build`` once.
        build: checks a state and gives it to the object.
    """

    call: Callable[..., Any] | None = None
    kind: type | None = None
    build: Callable[[Any, Any], None] | None = None


def read_pickle(
    data: bytes,
    find: Callable[[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle of protocol 2 to 5.

    Args:
        find: the maker, or the plain value, that a module's name stands for; raises ValueError.
        persistent: of a persistent id.

    Raises:
        ValueError: it is broken, or of other opcodes than values of checkpoints need.
    """
    machine = _Machine(data, find, persistent)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, struct.error, OverflowError) as error:
        raise ValueError(f"it is no pickle of a checkpoint: {error!r}"[:200]) from error


class _Machine:
    """A pickle's stack, its marks and its memo."""

    def __init__(self, data: bytes, find: Any, persistent: Any) -> None:
        self._data, self._at, self._find, self._persistent = data, 0, find, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._empty: dict[int, tuple[Maker, Any]] = {}  # objects that are not filled yet

    def run(self) -> Any:
        """Runs to the end."""
        data, stack, memo, methods = self._data, self._stack, self._memo, _METHODS
        while True:
            code = data[self._at]
            self._at += 1
            if code == 0x68:  # BINGET, one half of all
                stack.append(memo[data[self._at]])
                self._at += 1
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x4B:  # BININT1
                stack.append(data[self._at])
                self._at += 1
            elif code == 0x2E:  # STOP
                break
            elif code in methods:
                methods[code](self)
            else:
                raise ValueError(f"the opcode {code:#x} is none that a checkpoint needs")
        if self._empty or len(stack) != 1:
            raise ValueError("it ends too early")
        return stack[0]

    def _take(self, nbytes: int) -> bytes:
        begin, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise ValueError("it is truncated")
        return self._data[begin : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _marked(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise ValueError("its stack is empty")
        self._stack[-count:] = [items]

    def _set_items(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, _Opaque) or len(pairs) % 2:
            raise ValueError("it sets items of what is no dict")
        for key in pairs[::2]:
            if type(key) not in _KINDS:
                self._check_key(key)
        if type(target) is dict:
            target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _check_key(self, key: Any) -> None:
        """Hashing must end: nested values are no keys."""
        is_flat = type(key) is tuple and all(type(item) in _KINDS for item in key)
        if not is_flat and (isinstance(key, tuple | Maker) or id(key) in self._empty):
            raise ValueError("a key is neither plain nor flat")

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (list, _Opaque):
            raise ValueError("it appends to what is no list")
        if type(target) is list:
            target.extend(items)

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _push_found(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("the name of a class is no text")
        self._stack.append(self._find(module, name))

    def _global(self) -> None:
        self._push_found(self._line(), self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_found(module, name)

    def _reduce(self) -> None:
        args, maker = self._stack.pop(), self._stack.pop()
        if not isinstance(maker, Maker) or maker.call is None or type(args) is not tuple:
            raise ValueError("it calls what is no function of a checkpoint")
        self._stack.append(maker.call(*args))

    def _new(self) -> None:
        del self._stack[-1]  # its arguments: there are none
        maker = self._stack.pop()
        if not isinstance(maker, Maker) or maker.kind is None:
            raise ValueError("it makes an object that no checkpoint needs")
        made: Any = object.__new__(maker.kind)
        if maker.build is not None:
            self._empty[id(made)] = (maker, made)  # which keeps it: its id stays its own
        self._stack.append(made)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is _Opaque:
            return
        if id(target) not in self._empty:
            raise ValueError("it sets attributes of what has none to set")
        maker, _ = self._empty.pop(id(target))
        assert maker.build is not None
        maker.build(target, state)

    def _long(self) -> None:
        digits = self._take(self._number("B"))
        self._stack.append(int.from_bytes(digits, "little", signed=True))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise ValueError("it names a storage")
        self._stack.append(self._persistent(self._stack.pop()))


def _text(machine: _Machine, nbytes: int) -> None:
    machine._stack.append(machine._take(nbytes).decode())


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(value)


def _pushed(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(machine._number(form))


_METHODS: dict[int, Callable[[_Machine], Any]] = {
    code[0]: method
    for code, method in {
        b"\x80": lambda m: m._take(1),  # the protocol
        b"\x95": lambda m: m._take(8),  # a frame's length
        b"(": lambda m: m._marks.append(len(m._stack)),
        b")": _push(()),
        b"}": lambda m: m._stack.append({}),
        b"]": lambda m: m._stack.append([]),
        b"\x85": lambda m: m._tuple(1),
        b"\x86": lambda m: m._tuple(2),
        b"\x87": lambda m: m._tuple(3),
        b"t": lambda m: m._stack.append(tuple(m._marked())),
        b"a": lambda m: m._append([m._stack.pop()]),
        b"e": lambda m: m._append(m._marked()),
        b"s": lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
        b"u": lambda m: m._set_items(m._marked()),
        b"M": _pushed("<H"),
        b"J": _pushed("<i"),
        b"\x8a": _Machine._long,
        b"G": _pushed(">d"),
        b"X": lambda m: _text(m, m._number("<I")),
        b"\x8c": lambda m: _text(m, m._number("B")),
        b"C": lambda m: m._stack.append(m._take(m._number("B"))),
        b"B": lambda m: m._stack.append(m._take(m._number("<I"))),
        b"N": _push(None),
        b"\x88": _push(True),
        b"\x89": _push(False),
        b"c": _Machine._global,
        b"\x93": _Machine._stack_global,
        b"R": _Machine._reduce,
        b"\x81": _Machine._new,
        b"b": _Machine._build,
        b"q": lambda m: m._put(m._number("B")),
        b"r": lambda m: m._put(m._number("<I")),
        b"j": lambda m: m._stack.append(m._memo[m._number("<I")]),
        b"Q": _Machine._persistent_id,
    }.items()
}  # fmt: skip


_ANY = Maker(call=lambda *args: _Opaque(), kind=_Opaque)


def _no_room(*args: Any) -> _Opaque:
    """Of ``bytearray``, which a number would give so many bytes."""
    if any(isinstance(arg, int) for arg in args):
        raise ValueError("it asks for memory that nothing fills")
    return _Opaque()


def _find_any(module: str, name: str) -> Maker:
    return Maker(call=_no_room) if name == "bytearray" else _ANY


def check_stored(file: Any, nbytes: int) -> None:
    """Checks a zip file of ``torch.save``: nothing of it is larger when it is read.

    Raises:
        ValueError: it is another file, or its parts are packed or overlap.
        zipfile.BadZipFile: it is no zip file.
    """
    with zipfile.ZipFile(file) as parts:
        listed = parts.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in listed):
            raise ValueError("its parts are packed, which torch.save does not do")
        if sum(part.file_size for part in listed) > nbytes:
            raise ValueError("its parts overlap")


def load_plain(file: io.IOBase, nbytes: int) -> Any:
    """Plain values and tensors that ``torch.save`` wrote, on the CPU.

    Raises:
        Exception: a damaged or forged file fails in many ways.
    """
    buffered: Any = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
    check_stored(buffered, nbytes)
    with zipfile.ZipFile(buffered) as parts:
        for name in parts.namelist():
            if name.endswith("/data.pkl"):
                read_pickle(parts.read(name), _find_any, lambda pid: _Opaque())
    buffered.seek(0)
    return torch.load(buffered, map_location="cpu", weights_only=True)
