"""The safetensors format: file headers, folders with an index, plans of new files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerocore._C import StreamWay
from zerocore.checkpoint import checked_reads, checksums
from zerocore.checkpoint.byte_ranges import read_into
from zerocore.checkpoint.commit import files
from zerocore.checkpoint.safe_files import (
    is_count,
    is_plain_name,
    named,
    numel_of,
    opened,
    parsed_json,
    shown,
    size_of,
)

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_NBYTES = 100_000_000  # the limit of safetensors itself
DTYPE_OF = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
Facts = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # dtype and shape of tensors by name


@dataclass(frozen=True)
class Entry:
    """A C-contiguous tensor in a file, at bytes ``begin:end``."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    name: str

    def read(self, dtype: torch.dtype) -> Tensor:
        """Reads the whole tensor to the CPU, cast to ``dtype``."""
        values = torch.empty(self.shape, dtype=dtype, device="cpu")
        with opened(self.file) as file:
            read_into(file.fileno(), self.begin, self.dtype, values.view(-1))
        return values


def read_folder(folder: str | os.PathLike[str], verify: bool = True) -> dict[str, Entry]:
    """Returns a folder's tensors by name, from its index or all of its files; or one file's.
    ``verify``: compare the checksums of index and headers, if the folder has any.

    Raises FileNotFoundError if there is no such file, or none in the folder; ValueError if a file
    is not a safetensors file, is truncated or damaged, or lacks a tensor of the index.
    """
    path = Path(folder)
    sums = checked_reads.read_sums(path.parent if path.is_file() else path) if verify else None
    if path.is_file():
        return read_header(path, sums)
    index = path / INDEX_NAME
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no safetensors files in {path}")
        return {name: entry for file in files for name, entry in read_header(file, sums).items()}
    data = checked_reads.read_checked(
        index, sums if sums and index.name in sums else None, _MAX_HEADER_NBYTES
    )
    with named(index, "is not an index of safetensors files"):
        weight_map: dict[str, str] = parsed_json(data)["weight_map"]
        if bad := [file for file in weight_map.values() if not is_plain_name(file)]:
            raise ValueError(f"{shown(bad[0])} is not the name of a file in this folder")
    headers = {file: read_header(path / file, sums) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ValueError(
                f"{shown(name)} is not in {path / file}, where {index.name} says it is"
            )
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(path: Path, sums: checksums.Checksums | None = None) -> dict[str, Entry]:
    """Reads the tensors in a file's header, by safetensors' rules; a ValueError names the file."""
    listed = None if sums is None else sums.get(path.name)
    size = size_of(path)
    with named(path, "cannot be read as safetensors"):
        if listed is not None and listed.nbytes != size:
            raise ValueError(f"it has {size} bytes, expected {listed.nbytes}")
        length = int.from_bytes(checked_reads.read_range(path, listed, 0, 8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_NBYTES):
            raise ValueError(f"its header would have {length} bytes, the file has {size}")
        text = checked_reads.read_range(path, listed, 8, length)
        header = parsed_json(text)
        metadata = header.pop("__metadata__", {})
        if type(metadata) is not dict or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise ValueError("its metadata must be a dict of texts")
        entries = {name: _entry(path, 8 + length, name, facts) for name, facts in header.items()}
        _check_places(entries, 8 + length, size)
    return entries


def _entry(path: Path, base: int, name: str, facts: Mapping[str, Any]) -> Entry:
    if facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} has other fields than dtype, shape and data_offsets")
    shape, offsets, dtype = facts["shape"], facts["data_offsets"], DTYPE_OF.get(facts["dtype"])
    if dtype is None:
        raise ValueError(f"{shown(name)} has the unknown dtype {shown(facts['dtype'])}")
    if not (type(shape) is type(offsets) is list and all(map(is_count, [*shape, *offsets]))):
        raise ValueError(f"{shown(name)} has the shape {shown(shape)} at {shown(offsets)}")
    begin, end = offsets
    if end - begin != numel_of(shape) * dtype.itemsize:
        raise ValueError(
            f"{shown(name)} has {end - begin} bytes, for a shape of {shown(shape)} and {dtype}"
        )
    return Entry(path, dtype, tuple(shape), base + begin, base + end, name)


def _check_places(entries: Mapping[str, Entry], begin: int, size: int) -> None:
    """Rejects tensors that leave gaps or overlap between the header and the end of the file."""
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.end > size:
            raise ValueError(
                f"it is truncated: {shown(entry.name)} ends at byte {entry.end}, the file at {size}"
            )
        if entry.begin != begin:
            raise ValueError(f"{shown(entry.name)} is at byte {entry.begin}, expected {begin}")
        begin = entry.end
    if begin != size:
        raise ValueError(f"its tensors end at byte {begin}, the file at {size}")


@dataclass(frozen=True)
class Held(Entry):
    """A tensor in memory: loading hooks have made it from a file's tensor."""

    value: Tensor

    def read(self, dtype: torch.dtype) -> Tensor:
        return self.value.to(dtype)


@dataclass(frozen=True)
class FilePlan:
    """A file to write: its header, its tensors with their offsets, its size."""

    name: str
    header: bytes
    entries: dict[str, Entry]
    nbytes: int


def plan_files(
    folder: Path, tensors: Facts, max_file_nbytes: int, metadata: Mapping[str, str]
) -> list[FilePlan]:
    """Plans which tensors go into which file, in order; a file has at least one tensor. Raises
    ValueError for a dtype that safetensors does not know."""
    groups: list[list[str]] = []
    filled = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAME_OF:
            raise ValueError(f"'{name}' is {dtype}, which safetensors does not know")
        nbytes = prod(shape) * dtype.itemsize
        if not groups or filled + nbytes > max_file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    names = ["model.safetensors"]
    if (count := len(groups)) > 1:
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return [
        _plan_file(folder / file, {name: tensors[name] for name in group}, metadata)
        for file, group in zip(names, groups or [[]], strict=True)
    ]


def _plan_file(path: Path, tensors: Facts, metadata: Mapping[str, str]) -> FilePlan:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # The widest dtypes first, so that each tensor is aligned to its element size.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        begin, end = end, end + prod(shape) * dtype.itemsize
        facts = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = facts
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {name: _entry(path, base, name, header[name]) for name in tensors}
    return FilePlan(path.name, len(text).to_bytes(8, "little") + text, entries, base + end)


def write_lists(folder: Path, plans: Sequence[FilePlan], sums: checksums.Checksums) -> list[str]:
    """Writes the index of several files, and the list of checksums; returns both files' names."""
    lists = {}
    if len(plans) > 1:
        weight_map = {name: plan.name for plan in plans for name in plan.entries}
        total = sum(entry.end - entry.begin for plan in plans for entry in plan.entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        lists[INDEX_NAME] = json.dumps(index, indent=2).encode()
    sums.update({name: checksums.FileSums.of(text) for name, text in lists.items()})
    lists[checksums.NAME] = sums.text()
    for name, text in lists.items():
        files.write_file(folder / name, text)
    return list(lists)


def check_entries(
    entries: Iterable[Entry], part: int = 0, parts: int = 1, way: StreamWay = StreamWay.ANY
) -> int:
    """Compares a part of the entries' files; returns how many files have checksums."""
    by_file: dict[str, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file.name, []).append(entry)
        folder = entry.file.parent
    listed = (checked_reads.read_sums(folder) if by_file else None) or checksums.Checksums()
    sums = {name: listed[name] for name in sorted(by_file) if name in listed}

    def keys_in(name: str, ranges: list[range]) -> list[str]:
        return [
            entry.name
            for entry in by_file[name]
            if any(entry.begin < span.stop and span.start < entry.end for span in ranges)
        ]

    if sums:
        checked_reads.check_files(folder, sums, part, parts, way, keys_in)
    return len(sums)
