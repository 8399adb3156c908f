"""Changed copies of a checkpoint's files: bytes, opcodes, fields, kinds of files."""

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from zerocore._C import BLOCK_NBYTES

NUMBERS = (0, 1, -1, 2, 7, 63, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 10**40)
NAMES = (
    "", ".", "..", "../x", "/dev/zero", "/etc/passwd", "a/b", "a\\b", "\0", "x" * 5000, "[bold]",
    "\x1b[31m", "é", "__0_0.distcp", ".metadata", "pipe", "folder", "endless", "model.safetensors",
    "../other/__0_0.distcp", "../other/model.safetensors", "optim", "param_groups", "F32", "shape",
)  # fmt: skip
GLOBALS = (
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("builtins", "bytearray"),
    ("torch", "Size"), ("torch", "float64"), ("torch", "Tensor"), ("torch", "_utils"),
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("torch.serialization", "load"),
    ("torch.distributed.checkpoint.metadata", "Metadata"), ("torch.storage", "UntypedStorage"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"), ("codecs", "encode"),
)  # fmt: skip
CODES = b"0(.)}]abeuhjqrtRQcKMJGXNB\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x93\x94\x95\x96"
Mutate = Callable[[bytes, random.Random], bytes]


def bytes_changed(data: bytes, choose: random.Random) -> bytes:
    """Some bits flipped, or bytes set, cut out, put in, or repeated."""
    made = bytearray(data)
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        at = choose.randrange(len(made) + 1)
        kind = choose.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << choose.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = choose.choice((0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)))
        elif kind == 2:
            del made[at : at + choose.choice((1, 2, 8, 100))]
        elif kind == 3:
            made[at:at] = choose.randbytes(choose.choice((1, 2, 4, 8)))
        elif kind == 4:
            made[at:at] = made[at : at + choose.choice((4, 30, 300))]
        else:
            del made[at:]
    return bytes(made)


def pickle_changed(data: bytes, choose: random.Random) -> bytes:
    """An opcode, or its argument, is another one."""
    codes = [(code, arg, at) for code, arg, at in pickletools.genops(data) if at is not None]
    ends = [at for _, _, at in codes[1:]] + [len(data)]
    number = choose.randrange(len(codes))
    (code, arg, begin), end = codes[number], ends[number]
    other = choose.randrange(len(codes))
    kind = choose.randrange(8)
    if kind == 0:
        new = bytes([choose.choice(CODES)]) + data[begin + 1 : end]
    elif kind == 1:
        new = b""
    elif kind == 2:
        new = data[begin:end] * choose.choice((2, 3, 1000))
    elif kind == 3:
        new = data[codes[other][2] : ends[other]]
    elif kind == 4:
        new = data[begin:end] + choose.choice(_tricks())
    elif isinstance(arg, str):
        module, name = choose.choice(GLOBALS)
        new = choose.choice((_text(choose.choice(NAMES)), _text(module), _text(name)))
        if code.name == "GLOBAL":
            new = f"c{module}\n{name}\n".encode()
    elif isinstance(arg, int) and not isinstance(arg, bool):
        new = _number(choose.choice((*NUMBERS, arg + 1, arg * 2)))
        if "GET" in code.name or "PUT" in code.name:
            new = choose.choice((b"j", b"r")) + struct.pack("<I", choose.choice((0, 9, 1 << 31)))
    else:
        new = choose.choice((b"N", b"\x88", b")", b"]", b"}", _number(5), _text("x")))
    return data[:begin] + new + data[end:]


def _tricks() -> list[bytes]:
    """Pickles that take an unguarded reader any memory or time, or lead it elsewhere."""
    deep = b")" + b"\x85" * 200_000
    wide = b")" + b"2\x86" * 100 + b"N"
    return [
        b"r\xff\xff\xff\x7f", b"\x8e" + struct.pack("<Q", 1 << 40), b"\x95" + b"\xff" * 8,
        b"B\xff\xff\xff\xff", b"X\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f", b"]" * 100_000,
        b"}" + deep + b"Ns", b"}" + wide + b"s", b")q\xff" + b"h\xffh\xff\x86q\xff" * 60,
        b"cos\nsystem\n\x8c\x02id\x85R", b"ctorch\nSize\nN}\x8c\x01xK\x01s\x86b",
        b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R",
        b"ctorch\nSize\n(" + b"J\xff\xff\xff\x7f" * 9 + b"t\x85R",
        b"N}\x8c\x04nameK\x01s\x86b",
    ]  # fmt: skip


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    data = value.to_bytes(20, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def json_changed(data: bytes, choose: random.Random) -> bytes:
    """A field is another one, stands twice, or is gone; or the text of one is changed."""
    if choose.random() < 0.3:
        old, new = choose.choice(_texts())
        places = [at for at in range(len(data)) if data.startswith(old, at)]
        if places:
            at = choose.choice(places)
            return data[:at] + new + data[at + len(old) :]
    value = json.loads(data)
    holders: list[Any] = []
    _collect(value, holders)
    holder = choose.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = choose.choice(keys) if keys else None
    kind = choose.randrange(5)
    if key is None or kind == 0:
        if isinstance(holder, dict):
            holder[choose.choice(NAMES)] = _any(choose)
        else:
            holder.append(_any(choose))
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, dict):
        holder[choose.choice(NAMES)] = holder.pop(key)
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] += choose.choice((1, -1, 4, -4, 8, 1 << 32))
    else:
        holder[key] = _any(choose)
    return json.dumps(value).encode()


def _texts() -> list[tuple[bytes, bytes]]:
    return [
        (b'"', b'"\\ud800'), (b'"', b'"\\u0000'), (b'"', b'"\\u001b[31m'), (b"0", b"NaN"),
        (b"0", b"1e999"), (b"0", b"-0"), (b"0", b"0.0"), (b"1", b"Infinity"), (b"1", b"9" * 5000),
        (b"{", b"[" * 100_000), (b"{", b'{"a":' * 20_000), (b"[", b"[" + b"1," * 300_000),
        (b"[", b"[" + b"9999999999," * 30_000), (b":", b":true,"), (b",", b",,"), (b"{", b" {"),
        (b"{", b"\xef\xbb\xbf{"), (b"}", b"}\0"), (b"}", b"} "), (b'"', b"'"),
        (b'"', b'"\xff'), (b"[", b"[null,"),
    ]  # fmt: skip


def _collect(value: Any, holders: list[Any]) -> None:
    if isinstance(value, dict | list):
        holders.append(value)
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, holders)


def _any(choose: random.Random) -> Any:
    return choose.choice(
        [choose.choice(NUMBERS), choose.choice(NAMES), None, True, 0.5, [], {}, [0, 16], [[[]]]]
    )


def zip_changed(data: bytes, choose: random.Random) -> bytes:
    """A file of ``torch.save`` with another pickle, its parts packed, or listed otherwise."""
    with zipfile.ZipFile(io.BytesIO(data)) as parts:
        found = [(name, parts.read(name)) for name in parts.namelist()]
    buffer = io.BytesIO()
    packed = choose.random() < 0.03
    with zipfile.ZipFile(buffer, "w", 8 if packed else 0) as made:
        for name, part in found:
            if name.endswith("data.pkl") and choose.random() < 0.9:
                part = pickle_changed(part, choose)
            elif packed and "/data/" in name:
                part = bytes(300 << 20) if choose.random() < 0.005 else part
            made.writestr(name, part)
    return buffer.getvalue()


def sums_signed(text: bytes) -> bytes:
    """``checksums.json`` with the checksum that belongs to it."""
    return text + b"\n%08x\n" % crc32(text)


def sign_folder(folder: Path, name: str) -> None:
    """Makes the list of a checkpoint say what a changed file is."""
    path = folder / "checksums.json"
    if path.is_file() and (folder / name).is_file():
        facts = json.loads(path.read_bytes()[:-10])
        data = (folder / name).read_bytes()
        crcs = [crc32(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)]
        digits = "".join(f"{crc:08x}" for crc in crcs)
        facts["files"][name] = {"nbytes": len(data), "crc32": digits}
        path.write_bytes(sums_signed(json.dumps(facts).encode()))


def header_changed(data: bytes, choose: random.Random) -> bytes:
    """A safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]
    mutate = choose.choice((json_changed, json_changed, bytes_changed))
    made = mutate(text.rstrip(), choose)
    count = len(made) if choose.random() < 0.95 else choose.choice((0, 1 << 27, 1 << 63))
    rest = rest if choose.random() < 0.9 else rest + b"\0"
    return count.to_bytes(8, "little") + made + rest


def replace_file(path: Path, choose: random.Random) -> None:
    """Puts what is no file, or another one, in the place of a file."""
    path.unlink()
    kind = choose.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(choose.choice(("/dev/zero", "/dev/null", path.name, "../nowhere")))
    elif kind == 3:
        with open(path, "wb") as file:
            file.truncate(1 << choose.choice((0, 20, 31, 40)))
    elif kind == 4:
        path.write_bytes(b"")
    elif kind == 5:
        path.write_bytes(choose.randbytes(3000))
