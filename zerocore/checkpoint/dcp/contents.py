"""The small files of a checkpoint, each read once: metadata, sizes and checksums."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zerocore._C import StreamWay
from zerocore.checkpoint import checked_reads, checksums
from zerocore.checkpoint.byte_ranges import in_threads
from zerocore.checkpoint.dcp.save_plan import FORMAT
from zerocore.checkpoint.safe_files import (
    is_count,
    is_plain_name,
    named,
    numel_of,
    opened,
    shown,
    size_of,
)
from zerocore.checkpoint.safe_pickles import Maker, check_stored, read_pickle


class Stored(NamedTuple):
    """The bytes in a file of one chunk of a tensor, or of a plain value, with its key."""

    key: str
    begin: int
    end: int

    def is_good(self, file: Any) -> bool:
        """Whether the checksums that ``torch.save`` writes are right; they do not cover headers."""
        nbytes = self.end - self.begin
        try:
            part = io.BufferedReader(Part(file, self.begin, nbytes))
            with zipfile.ZipFile(part) as chunk:
                check_stored(chunk, nbytes)
                return chunk.testzip() is None
        except Exception:  # a damaged zip file fails in many ways
            return False


class Contents:
    """The contents of a checkpoint's files. Raises FileNotFoundError if there is no metadata,
    ValueError with its name if a small file is broken."""

    def __init__(self, folder: Path) -> None:
        path = folder / checksums.METADATA
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has no {checksums.METADATA}: it is not a checkpoint, or is unfinished"
            )
        self.folder = folder
        self.sums = checked_reads.read_sums(folder)  # None if torch has written the files
        data = checked_reads.read_checked(path, self.sums)
        with named(path):
            self.metadata: dcp.Metadata = read_metadata(data)
        self.is_ours = getattr(self.metadata.storage_meta, "save_id", None) == FORMAT
        if self.is_ours and self.sums is None:
            raise ValueError(f"{folder / checksums.NAME} is missing")

    @cached_property
    def files(self) -> dict[str, list[Stored]]:
        """The items of each file, in their order in the file."""
        parts: dict[str, list[Stored]] = defaultdict(list)
        for index, info in self.metadata.storage_data.items():
            item = Stored(index.fqn, info.offset, info.offset + info.length)
            parts[info.relative_path].append(item)
        return {name: sorted(items, key=lambda item: item.begin) for name, items in parts.items()}

    def rename(self, names: Mapping[str, str]) -> None:
        """Renames tensors of the model and their optimizer states; call it before ``files``."""
        paths: dict[str, Any] = self.metadata.planner_data or {}
        new = {}
        for key, path in paths.items():
            place = 1 if path[0] == "model" else 2 if path[:2] == ("optim", "state") else None
            if place is not None and path[place] in names:
                path = (*path[:place], names[path[place]], *path[place + 1 :])
                new[key] = (".".join(map(str, path)), path)
        facts, places = self.metadata.state_dict_metadata, self.metadata.storage_data
        self.metadata.planner_data = dict(new.get(key, (key, path)) for key, path in paths.items())
        self.metadata.state_dict_metadata = {
            new.get(key, (key,))[0]: tensor for key, tensor in facts.items()
        }
        self.metadata.storage_data = {
            replace(index, fqn=new.get(index.fqn, (index.fqn,))[0]): info
            for index, info in places.items()
        }

    def sums_of(self, name: str) -> checksums.FileSums | None:
        """Returns a file's checksums; None if the folder has none, ValueError if this file alone
        lacks them."""
        if self.sums is not None and name not in self.sums:
            raise ValueError(f"{self.folder / name} is not in {checksums.NAME}")
        return None if self.sums is None else self.sums[name]

    def keys_in(self, name: str, ranges: list[range]) -> list[str]:
        """Returns the keys in byte ranges of a file; only the damaged ones if chunks show which."""
        items = [
            item
            for item in self.files.get(name, ())
            if any(item.begin < span.stop and span.start < item.end for span in ranges)
        ]
        with opened(self.folder / name) as file:
            damaged = [item.key for item in items if not item.is_good(file)]
        return damaged or [item.key for item in items]

    def check_sizes(self) -> None:
        """Raises ValueError with file and key if a size is wrong, or two chunks overlap."""
        for name, items in self.files.items():
            _check_size(self.folder / name, items, self.sums_of(name))

    def verify(
        self,
        part: int = 0,
        parts: int = 1,
        way: StreamWay = StreamWay.ANY,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Compares the checksums of one of ``parts`` parts of all bytes, as ``check_files`` does.
        Torch's files have only checksums in their chunks; the first part compares all of these."""
        if self.sums is not None:
            sums = dict(sorted(self.sums.items()))
            checked_reads.check_files(self.folder, sums, part, parts, way, self.keys_in, advance)
            return
        for name, items in self.files.items() if part == 0 else ():
            path = self.folder / name
            with opened(path) as file:
                results = in_threads(partial(Stored.is_good, file=file), items)
                for item, is_good in zip(items, results, strict=True):
                    if not is_good:
                        raise ValueError(f"{path} {checked_reads.DAMAGED} in {shown(item.key)}")
                    advance(item.end - item.begin)


def _check_size(path: Path, items: list[Stored], sums: checksums.FileSums | None) -> None:
    size = size_of(path) if path.exists() else -1
    last = None
    for item in items:
        if item.end > size:
            fault = "is missing" if size < 0 else f"has {size} bytes"
            raise ValueError(
                f"{path} {fault}, but {shown(item.key)} is at bytes {item.begin}:{item.end}"
            )
        if last is not None and item.begin < last.end:
            raise ValueError(f"{path}: {shown(last.key)} and {shown(item.key)} overlap")
        last = item
    if sums is not None and sums.nbytes != size:
        raise ValueError(f"{path} has {size} bytes, expected {sums.nbytes}")


class Part(io.RawIOBase):
    """A byte range of a file, as a file. Threads may read parts of one file at the same time."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._length - self._at))
        data = os.pread(self._file.fileno(), count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


_PACKAGE = "torch.distributed.checkpoint."
Test = Callable[[Any], bool]


def read_metadata(data: bytes) -> dcp.Metadata:
    """Reads pickled metadata without running code; raises ValueError if they are broken."""
    metadata = read_pickle(data, _find)
    if not isinstance(metadata, dcp.Metadata):
        raise ValueError("it does not hold a checkpoint's metadata")
    _check_pieces(metadata)
    return metadata


def _is_a(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds)


def _all_of(kind: type[Sequence[Any]], test: Test) -> Test:
    return lambda value: type(value) is kind and all(map(test, value))


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _dict_of(key: Test, value: Test) -> Test:
    def is_dict(items: Any) -> bool:
        return type(items) is dict and all(map(key, items)) and all(map(value, items.values()))

    return is_dict


_is_size, _is_text = _is_a(torch.Size), _is_a(str)
_is_strides = _or_none(_all_of(tuple, is_count))
_FIELDS: dict[type, Mapping[str, Test]] = {
    dcp.MetadataIndex: {"fqn": _is_text, "offset": _or_none(_is_size), "index": _or_none(is_count)},
    _StorageInfo: {
        "relative_path": is_plain_name,
        "offset": is_count,
        "length": is_count,
        "transform_descriptors": _or_none(_all_of(list, _is_text)),
    },
    dcp.ChunkStorageMetadata: {"offsets": _is_size, "sizes": _is_size},
    dcp.TensorStorageMetadata: {
        "properties": _is_a(dcp.TensorProperties),
        "size": _is_size,
        "chunks": _all_of(list, _is_a(dcp.ChunkStorageMetadata)),
    },
    dcp.StorageMeta: {
        "checkpoint_id": _or_none(_is_text),
        "save_id": _or_none(_is_text),
        "load_id": _or_none(_is_text),
        "modules": _or_none(_all_of(list, _is_text)),
    },
    dcp.Metadata: {
        "state_dict_metadata": _dict_of(
            _is_text, _is_a(dcp.TensorStorageMetadata, dcp.BytesStorageMetadata)
        ),
        "planner_data": _or_none(_dict_of(_is_text, _all_of(tuple, _is_a(str, int)))),
        "storage_data": _dict_of(_is_a(dcp.MetadataIndex), _is_a(_StorageInfo)),
        "storage_meta": _or_none(_is_a(dcp.StorageMeta)),
        "version": _or_none(_is_text),
    },
}


def _fill(target: Any, state: Any) -> None:
    tests = _FIELDS[type(target)]
    if type(state) is not dict:
        raise ValueError(f"the fields of {type(target).__name__} are not a dict")
    for name, value in state.items():
        if name not in tests or not tests[name](value):
            raise ValueError(f"{type(target).__name__}.{shown(name)} cannot be {shown(value)}")
    missing = tests.keys() - state.keys() if len(state) < len(tests) else ()
    for name in missing:
        if not tests[name](None):  # some releases of torch leave out optional fields
            raise ValueError(f"{type(target).__name__}.{name} is missing")
    target.__dict__.update(state)


def _fill_properties(target: dcp.TensorProperties, state: Any) -> None:
    kinds = [torch.dtype, torch.layout, bool, dcp._MEM_FORMAT_ENCODING, bool]
    fields, strides = (state[:5], state[5:]) if type(state) is tuple else ((), ())
    if list(map(type, fields)) != kinds or strides[1:] or not all(map(_is_strides, strides)):
        raise ValueError("a tensor's properties have unexpected types")
    target.__setstate__(fields)  # torch 2.15 adds strides: no load needs them, older ones take none


def _size(sizes: Any) -> torch.Size:
    if type(sizes) is not tuple or not all(map(is_count, sizes)):
        raise ValueError(f"a shape cannot be {shown(sizes)}")
    return torch.Size(sizes)


def _memory_format(number: Any) -> Any:
    if type(number) is not int:
        raise ValueError("a memory format is not a number")
    return dcp._MEM_FORMAT_ENCODING(number)


def _named_format(kind: Any, name: Any) -> Any:
    """Returns a memory format as early releases of Python 3.11 pickle it: getattr(kind, name)."""
    formats = dcp._MEM_FORMAT_ENCODING.__members__
    if kind is not _MEMORY_FORMAT or type(name) is not str or name not in formats:
        raise ValueError(f"no checkpoint needs the attribute {shown(name)} of {shown(kind)}")
    return formats[name]


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"a checkpoint cannot have the layout {shown(name)}")
    return torch.strided


_PATH = Maker(call=lambda *parts: None)  # the path that the folder had when it was saved
_MEMORY_FORMAT = Maker(call=_memory_format)
_MAKERS: dict[tuple[str, str], Maker] = {
    ("builtins", "getattr"): Maker(call=_named_format),
    ("torch", "Size"): Maker(call=_size),
    ("torch.serialization", "_get_layout"): Maker(call=_layout),
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    (_PACKAGE + "metadata", "TensorProperties"): Maker(
        kind=dcp.TensorProperties, build=_fill_properties
    ),
    (_PACKAGE + "metadata", "BytesStorageMetadata"): Maker(kind=dcp.BytesStorageMetadata),
    **{
        (module, name): _PATH
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
    **{(kind.__module__, kind.__name__): Maker(kind=kind, build=_fill) for kind in _FIELDS},
}


def _find(module: str, name: str) -> Any:
    if (module, name) in _MAKERS:
        return _MAKERS[module, name]
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    raise ValueError(
        f"it names {shown(f'{module}.{name}')}, which no checkpoint needs; if you trust the "
        "file, read it with torch.distributed.checkpoint.FileSystemReader"
    )


def _check_pieces(metadata: dcp.Metadata) -> None:
    """Rejects metadata unless pieces cover each tensor, and a file has each piece."""
    count = 0
    boxes: dict[tuple[int, int], list[tuple[Any, int]]] = {}  # shared by tensors cut alike
    for key, facts in metadata.state_dict_metadata.items():
        pieces, itemsize = [(None, 0)], 0
        if isinstance(facts, dcp.TensorStorageMetadata):
            alike = (id(facts.size), id(facts.chunks))
            if alike not in boxes:
                boxes[alike] = _checked_boxes(key, facts)
            pieces, itemsize = boxes[alike], facts.properties.dtype.itemsize
        for offsets, numel in pieces:
            info = metadata.storage_data.get(dcp.MetadataIndex(key, offsets))
            if info is None:
                raise ValueError(f"{shown(key)} has a piece that was not written")
            if info.length < numel * itemsize and not info.transform_descriptors:
                raise ValueError(
                    f"{shown(key)} has {info.length} bytes, expected {numel * itemsize}"
                )
        count += len(pieces)
    if count != len(metadata.storage_data):
        raise ValueError("it lists stored pieces that belong to no tensor")


def _checked_boxes(key: str, facts: dcp.TensorStorageMetadata) -> list[tuple[Any, int]]:
    """Returns the offsets and the number of elements of each piece; ValueError if impossible."""
    pieces = [(chunk.offsets, numel_of(chunk.sizes)) for chunk in facts.chunks]
    for chunk in facts.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(facts.size) or any(
            begin + size > whole
            for begin, size, whole in zip(chunk.offsets, chunk.sizes, facts.size, strict=True)
        ):
            raise ValueError(f"{shown(key)} has a piece outside its shape {shown(facts.size)}")
    if sum(numel for _, numel in pieces) != numel_of(facts.size) or _overlap(facts.chunks):
        raise ValueError(f"the pieces of {shown(key)} do not tile its shape {shown(facts.size)}")
    return pieces


def _overlap(chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    """Whether boxes share elements, or are arranged in a way that no system saves. Each dimension
    in turn divides every group of boxes into smaller groups."""
    groups = [[chunk for chunk in chunks if 0 not in chunk.sizes]]
    dims = range(len(chunks[0].sizes) if chunks else 0)
    for dim in [*dims, *dims]:
        groups = [part for group in groups for part in _divided(group, dim) if len(part) > 1]
    return any(len(group) > 1 for group in groups)


def _divided(
    group: list[dcp.ChunkStorageMetadata], dim: int
) -> Iterator[list[dcp.ChunkStorageMetadata]]:
    """Yields the groups of boxes whose intervals in one dimension overlap."""
    part: list[dcp.ChunkStorageMetadata] = []
    end = 0
    for chunk in sorted(group, key=lambda chunk: chunk.offsets[dim]):
        if chunk.offsets[dim] >= end and part:
            yield part
            part = []
        part.append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    yield part
