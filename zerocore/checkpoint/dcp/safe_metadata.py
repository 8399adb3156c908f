"""Reads ``.metadata`` of a checkpoint: known types, each field checked, parts that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zerocore.checkpoint.safe_files import is_count, is_plain_name, numel_of, shown
from zerocore.checkpoint.safe_pickles import Maker, read_pickle

_PACKAGE = "torch.distributed.checkpoint."
Test = Callable[[Any], bool]


def read_metadata(data: bytes) -> dcp.Metadata:
    """The metadata that were pickled, of which nothing is run; raises ValueError if broken."""
    metadata = read_pickle(data, _find)
    if not isinstance(metadata, dcp.Metadata):
        raise ValueError("it holds no metadata of a checkpoint")
    _check_pieces(metadata)
    return metadata


def _is_a(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds)


def _all_of(kind: type[Sequence[Any]], test: Test) -> Test:
    return lambda value: type(value) is kind and all(map(test, value))


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _dict_of(key: Test, value: Test) -> Test:
    def is_dict(found: Any) -> bool:
        return type(found) is dict and all(map(key, found)) and all(map(value, found.values()))

    return is_dict


_is_size, _is_text = _is_a(torch.Size), _is_a(str)
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
        raise ValueError(f"the fields of {type(target).__name__} are no dict")
    for name, value in state.items():
        if name not in tests or not tests[name](value):
            raise ValueError(f"{type(target).__name__}.{shown(name)} cannot be {shown(value)}")
    for name, test in tests.items():
        if name not in state and not test(None):  # some torch leaves out what may be None
            raise ValueError(f"{type(target).__name__}.{name} is missing")
    target.__dict__.update(state)


def _fill_properties(target: dcp.TensorProperties, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, dcp._MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or list(map(type, state)) != list(kinds):
        raise ValueError("the properties of a tensor are others")
    target.__setstate__(state)


def _size(sizes: Any) -> torch.Size:
    if type(sizes) is not tuple or not all(map(is_count, sizes)):
        raise ValueError(f"a shape cannot be {shown(sizes)}")
    return torch.Size(sizes)


def _memory_format(number: Any) -> Any:
    if type(number) is not int:
        raise ValueError("a memory format is no number")
    return dcp._MEM_FORMAT_ENCODING(number)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"the layout {shown(name)} is none of a checkpoint")
    return torch.strided


_PATH = Maker(call=lambda *parts: None)  # where the folder once was
_MAKERS: dict[tuple[str, str], Maker] = {
    ("torch", "Size"): Maker(call=_size),
    ("torch.serialization", "_get_layout"): Maker(call=_layout),
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"): Maker(call=_memory_format),
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
    if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
        return found
    raise ValueError(
        f"it names {shown(f'{module}.{name}')}, which no checkpoint needs; if you trust the "
        "file, read it with torch.distributed.checkpoint.FileSystemReader"
    )


def _check_pieces(metadata: dcp.Metadata) -> None:
    """Whether the pieces of each tensor are all of it, and each lies in a file."""
    count = 0
    for key, facts in metadata.state_dict_metadata.items():
        for index, nbytes in _pieces_of(key, facts):
            info = metadata.storage_data.get(index)
            if info is None:
                raise ValueError(f"{shown(key)} has a piece that was not written")
            if info.length < nbytes and not info.transform_descriptors:
                raise ValueError(f"{shown(key)} has {info.length} bytes, expected {nbytes}")
            count += 1
    if count != len(metadata.storage_data):
        raise ValueError("it says where pieces lie that no tensor has")


def _pieces_of(key: str, facts: Any) -> Iterator[tuple[dcp.MetadataIndex, int]]:
    """The index of each piece, and the bytes that it has at least."""
    if isinstance(facts, dcp.BytesStorageMetadata):
        yield dcp.MetadataIndex(key), 0
        return
    dims, itemsize, numel = len(facts.size), facts.properties.dtype.itemsize, 0
    for chunk in facts.chunks:
        yield dcp.MetadataIndex(key, chunk.offsets), itemsize * numel_of(chunk.sizes)
        numel += numel_of(chunk.sizes)
        if not len(chunk.offsets) == len(chunk.sizes) == dims or any(
            begin + size > whole
            for begin, size, whole in zip(chunk.offsets, chunk.sizes, facts.size, strict=True)
        ):
            raise ValueError(f"{shown(key)} has a piece outside of its shape {shown(facts.size)}")
    if numel != numel_of(facts.size) or _overlap(facts.chunks):
        raise ValueError(f"the pieces of {shown(key)} are not all of its shape {shown(facts.size)}")


def _overlap(chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    """Whether boxes share elements, or lie in a way that no system saves.

    A dimension divides them into groups, the next one each of these.
    """
    groups = [[chunk for chunk in chunks if 0 not in chunk.sizes]]
    dims = range(len(chunks[0].sizes) if chunks else 0)
    for dim in [*dims, *dims]:
        groups = [part for group in groups for part in _divided(group, dim) if len(part) > 1]
    return any(len(group) > 1 for group in groups)


def _divided(
    group: list[dcp.ChunkStorageMetadata], dim: int
) -> Iterator[list[dcp.ChunkStorageMetadata]]:
    """The boxes whose intervals in one dimension touch one another."""
    part: list[dcp.ChunkStorageMetadata] = []
    end = 0
    for chunk in sorted(group, key=lambda chunk: chunk.offsets[dim]):
        if chunk.offsets[dim] >= end and part:
            yield part
            part = []
        part.append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    yield part
