"""Chunks of torch's checkpoint files: each is the zip file that ``torch.save`` makes of one tensor.

The chunks that this module makes have their parts at fixed offsets. So a chunk's length follows
from the tensor's bytes, and its other bytes from dtype, shape and checksum. Its parts are

    data.pkl | data/0 (the tensor's memory) | byteorder | version | list of the four with checksums
    | comment: zeros
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch

MAX_NBYTES = 1 << 30  # the most bytes of a chunk's data; zip files above 4 GiB have another format
HEAD_NBYTES = 768  # bytes before a chunk's data: fits the shape of a 24-D tensor
_ALIGNMENT = 64
_ORDER = (b"archive/byteorder", b"little")
_VERSION = (b"archive/version", b"3\n")
_PICKLE_NAME, _DATA_NAME = b"archive/data.pkl", b"archive/data/0"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_NAMES = (_PICKLE_NAME, _DATA_NAME, _ORDER[0], _VERSION[0])
_TAIL_NBYTES = (
    sum(_LOCAL.size + len(name) + len(data) for name, data in (_ORDER, _VERSION))
    + sum(_CENTRAL.size + len(name) for name in _NAMES)
    + _END.size
)


def chunk_nbytes(data_nbytes: int) -> int:
    """Returns the size of the chunk around a tensor of that many bytes."""
    return -(-(HEAD_NBYTES + data_nbytes + _TAIL_NBYTES) // _ALIGNMENT) * _ALIGNMENT


def frame(
    dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], crc: int
) -> tuple[bytes, bytes]:
    """Returns the bytes before and after a dense tensor with the checksum ``crc``."""
    numel = torch.Size(sizes).numel()
    nbytes = numel * dtype.itemsize
    pickled = _pickled(dtype, tuple(sizes), tuple(strides), numel)
    facts = [
        (_PICKLE_NAME, crc32(pickled), len(pickled)),
        (_DATA_NAME, crc, nbytes),
        *((name, crc32(data), len(data)) for name, data in (_ORDER, _VERSION)),
    ]
    head = _local(*facts[0]) + pickled
    padding = HEAD_NBYTES - len(head) - len(_local(*facts[1])) - 4
    if padding < 0:
        raise ValueError(f"a tensor has {len(sizes)} dimensions, too many for a checkpoint")
    offsets = [0, len(head)]
    # As in torch's files, the padding is an extra field named "FB".
    head += _local(*facts[1], b"FB" + struct.pack("<H", padding) + bytes(padding))
    tail = b""
    for fact, (_, data) in zip(facts[2:], (_ORDER, _VERSION), strict=True):
        offsets.append(HEAD_NBYTES + nbytes + len(tail))
        tail += _local(*fact) + data
    begin = HEAD_NBYTES + nbytes + len(tail)
    listed = b"".join(
        _CENTRAL.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
        + name
        for (name, crc, size), at in zip(facts, offsets, strict=True)
    )
    comment = chunk_nbytes(nbytes) - HEAD_NBYTES - nbytes - _TAIL_NBYTES
    tail += listed + _END.pack(b"PK\5\6", 0, 0, 4, 4, len(listed), begin, comment)
    return head, tail + bytes(comment)


def has_form(
    head: bytes, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    """Whether an intact head belongs to a tensor of this form."""
    begin = _LOCAL.size + len(_PICKLE_NAME)
    return head.startswith(_pickled(dtype, sizes, strides, torch.Size(sizes).numel()), begin)


def _local(name: bytes, crc: int, size: int, extra: bytes = b"") -> bytes:
    facts = _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, crc, size, size, len(name), len(extra))
    return facts + name + extra


class _Storage:
    """A stand-in for the tensor's memory."""


class _Tensor:
    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Pickler(pickle.Pickler):
    storage: tuple[Any, ...]

    def persistent_id(self, obj: Any) -> Any:
        return self.storage if isinstance(obj, _Storage) else None


@lru_cache(4096)  # a weight and its moments have the same form
def _pickled(
    dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], numel: int
) -> bytes:
    typed = torch.storage._dtype_to_storage_type_map().get(dtype)
    common: tuple[Any, ...] = (_Storage(), 0, sizes, strides, False, OrderedDict())
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=2)
    if typed is not None:
        pickler.storage = ("storage", getattr(torch, typed), "0", "cpu", numel)
        pickler.dump(_Tensor(torch._utils._rebuild_tensor_v2, common))
    else:
        nbytes = numel * dtype.itemsize
        pickler.storage = ("storage", torch.UntypedStorage, "0", "cpu", nbytes)
        pickler.dump(_Tensor(torch._utils._rebuild_tensor_v3, (*common, dtype)))
    return buffer.getvalue()
