"""Reads pickles without running their code: it returns no class and sets no attribute of one.

``pickle.Unpickler`` gives classes to a pickle, which can then set their attributes for the whole
process. It also hashes any key, and nested tuples take forever or overflow the stack. This reader
takes only the opcodes that checkpoints need, and a name stands for a :class:`Maker` that checks
its arguments. It never recurses. The size of the pickle bounds its memory: no opcode reserves
memory for bytes that do not follow.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


class _Opaque:
    """A stand-in for an object that ``torch.load`` will make, or reject."""


@dataclass(frozen=True, eq=False)
class Maker:
    """A stand-in for a class or a function that a pickle names."""

    call: Callable[..., Any] | None = None  # checks the arguments, and makes a value from them
    kind: type | None = None  # the class of an empty object, which ``build`` fills once
    build: Callable[[Any, Any], None] | None = None  # checks a state, and sets it on the object


def read_pickle(
    data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Reads a pickle of protocol 2 to 5; ValueError if it is broken, or has other opcodes.
    ``find`` returns the maker, or plain value, that a name stands for, ``persistent`` the one of
    an id."""
    try:
        return _Reader(data, find, persistent).load()
    except _BROKEN as error:
        raise ValueError(f"it is not a checkpoint's pickle: {error!r}"[:200]) from error


_BROKEN = (
    IndexError, KeyError, TypeError, AttributeError, OverflowError, EOFError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
_PLAIN = frozenset({type(None), str, int, bool, float, bytes})


class _Reader(pickle._Unpickler):
    """A reader of the opcodes of checkpoints; an opcode checks each object that it changes."""

    stack: list[Any]
    metastack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self.read, self.readline = file.read, file.readline  # all is in memory: frames do not help
        self.stack, self.metastack = [], []
        self.append = self.stack.append
        self._find, self._persistent = find, persistent
        self._empty: dict[int, tuple[Any, Callable[[Any, Any], None]]] = {}  # by id, not yet filled

    def load(self) -> Any:
        read, dispatch, memo = self.read, self.dispatch, self.memo
        keep, get, get_far = (pickle.MEMOIZE[0], pickle.BINGET[0], pickle.LONG_BINGET[0])
        try:
            while True:
                code = read(1)[0]
                if code == keep:  # these three opcodes are half of a file
                    memo[len(memo)] = self.stack[-1]
                elif code == get:
                    self.append(memo[read(1)[0]])
                elif code == get_far:
                    self.append(memo[int.from_bytes(read(4), "little")])
                else:
                    dispatch[code](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            value = stop.value
        if self._empty or self.stack or self.metastack:
            raise ValueError("it ends too early")
        return value

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise ValueError("it names a storage")
        return self._persistent(pid)

    def _frame(self) -> None:
        self.read(8)

    def _text(self) -> None:
        (count,) = struct.unpack("<I", self.read(4))
        self.append(str(self.read(count), "utf-8"))  # Python's reader accepts surrogates, too

    def _short_text(self) -> None:
        count = self.read(1)[0]
        self.append(str(self.read(count), "utf-8"))

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        kind = type(self.stack[-1])
        if kind is list:
            self.stack[-1].extend(values)
        elif kind is not _Opaque:
            raise ValueError("it appends to an object that is not a list")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, pairs: list[Any]) -> None:
        kind = type(self.stack[-1])
        if kind not in (dict, _Opaque) or len(pairs) % 2 != 0:
            raise ValueError("it sets items of an object that is not a dict")
        keys = pairs[::2]
        for key in keys:
            if type(key) not in _PLAIN:
                self._check_key(key)
        if kind is dict:
            self.stack[-1].update(zip(keys, pairs[1::2], strict=True))

    def _check_key(self, key: Any) -> None:
        """Rejects a key whose hash may take forever, or change later."""
        is_nested = isinstance(key, tuple) and not _PLAIN.issuperset(map(type, key))
        if is_nested or isinstance(key, Maker) or id(key) in self._empty:
            raise ValueError("a key is neither plain nor flat")

    def _reduce(self) -> None:
        args, maker = self.stack.pop(), self.stack[-1]
        if type(maker) is not Maker or maker.call is None or type(args) is not tuple:
            raise ValueError("it calls a function that no checkpoint needs")
        self.stack[-1] = maker.call(*args)

    def _new_object(self) -> None:
        self.stack.pop()  # the arguments, which it ignores
        maker = self.stack[-1]
        if type(maker) is not Maker or maker.kind is None:
            raise ValueError("it makes an object that no checkpoint needs")
        new: Any = object.__new__(maker.kind)
        self.stack[-1] = new
        if maker.build is not None:
            self._empty[id(new)] = new, maker.build

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is _Opaque:
            return
        if id(target) not in self._empty:
            raise ValueError("it sets attributes of an object that takes none")
        target, build = self._empty.pop(id(target))
        build(target, state)

    _KEPT = (
        pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE,
        pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1,
        pickle.BINFLOAT, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.EMPTY_TUPLE, pickle.TUPLE,
        pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.EMPTY_DICT,
        pickle.BINPUT, pickle.LONG_BINPUT, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID,
    )  # fmt: skip
    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _KEPT},
        pickle.FRAME[0]: _frame,
        pickle.BINUNICODE[0]: _text,
        pickle.SHORT_BINUNICODE[0]: _short_text,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _new_object,
        pickle.BUILD[0]: _build,
    }


_ANY = Maker(call=lambda *args: _Opaque(), kind=_Opaque)


def _no_room(*args: Any) -> _Opaque:
    """Rejects ``bytearray(n)``, which would allocate n bytes."""
    if any(isinstance(arg, int) for arg in args):
        raise ValueError("it asks for memory that nothing fills")
    return _Opaque()


def _find_any(module: str, name: str) -> Maker:
    return Maker(call=_no_room) if name == "bytearray" else _ANY


def check_stored(file: zipfile.ZipFile, nbytes: int) -> None:
    """Rejects a file of ``torch.save`` whose parts are compressed or overlap."""
    listed = file.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in listed):
        raise ValueError("its parts are compressed, which torch.save does not do")
    if sum(part.file_size for part in listed) > nbytes:
        raise ValueError("its parts overlap")


def load_plain(file: io.IOBase, nbytes: int) -> Any:
    """Loads a plain value or tensor of ``torch.save`` to the CPU; damaged files raise any error."""
    buffered: Any = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
    needed: list[str] = []  # classes, functions and storages

    def find(module: str, name: str) -> Maker:
        needed.append(name)
        return _find_any(module, name)

    def find_storage(pid: Any) -> _Opaque:
        needed.append("a storage")
        return _Opaque()

    values: list[Any] = []
    with zipfile.ZipFile(buffered) as parts:
        check_stored(parts, nbytes)
        for name in parts.namelist():
            if name.endswith("/data.pkl"):
                values.append(read_pickle(parts.read(name), find, find_storage))
    if len(values) == 1 and not needed:
        return values[0]  # there is nothing for torch to make
    buffered.seek(0)
    return torch.load(buffered, map_location="cpu", weights_only=True)
