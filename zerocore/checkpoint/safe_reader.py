"""Reads files of ``torch.distributed.checkpoint``: of tensors those bytes that are needed.

Their metadata and their plain values are pickles, which could run code. Here only what such a
checkpoint needs is made of them; anything else is an error.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from io import IOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zerocore.checkpoint.chunk_reads import locate, read_box
from zerocore.checkpoint.io_threads import in_threads

_PACKAGE = "torch.distributed.checkpoint."
_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("_codecs", "encode"),
        (_PACKAGE + "filesystem", "_StorageInfo"),
        *(
            (_PACKAGE + "metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"the checkpoint's .metadata names {module}.{name}, which no checkpoint needs; if you "
            "trust the file, read it with torch.distributed.checkpoint.FileSystemReader"
        )


def unpickled(file: IOBase, path: object) -> Metadata:
    """The metadata of a checkpoint.

    Raises:
        ValueError: it is broken or holds anything else; names ``path``.
    """
    try:
        metadata: Metadata = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return metadata


class SafeReader(FileSystemReader):
    """As ``FileSystemReader``, with metadata of known types only, and chunks read in part."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises ValueError if the file is broken or holds anything else."""
        path = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(path, "rb") as file:
            metadata = unpickled(file, path)
        if getattr(metadata, "storage_meta", None) is not None:
            metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError or ValueError that names file and key."""
        by_file: dict[str, list[ReadItem]] = {}
        rest: list[ReadItem] = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or info.transform_descriptors:
                rest.append(item)
            else:
                by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            rest += self._read_tensors(Path(self.path) / name, items, planner)
        done: Future[None] = super().read_data(replace(plan, items=rest), planner)
        return done

    def _read_tensors(
        self, path: Path, items: list[ReadItem], planner: LoadPlanner
    ) -> list[ReadItem]:
        """Reads what it can; returns the items that torch has to read."""
        with open(path, "rb", buffering=0) as file:

            def read(wanted: tuple[ReadItem, Tensor]) -> bool:
                item, target = wanted
                info = self.storage_data[item.storage_index]
                chunk = locate(file.fileno(), info.offset, info.length)
                if chunk is None:
                    return False
                try:
                    read_box(file.fileno(), chunk, item.storage_offsets, item.lengths, target)
                except (OSError, RuntimeError) as error:
                    raise OSError(f"{path}: '{item.storage_index.fqn}': {error}") from error
                return True

            ordered = sorted(items, key=lambda i: self.storage_data[i.storage_index].offset)
            wanted = [(item, planner.resolve_tensor(item).detach()) for item in ordered]
            on_cpu = all(target.device.type == "cpu" for _, target in wanted)
            # A device's copies go to this thread's stream.
            were_read = in_threads(read, wanted) if on_cpu else map(read, wanted)
            left = []
            for (item, target), was_read in zip(wanted, were_read, strict=True):
                if was_read:
                    planner.commit_tensor(item, target)
                else:
                    left.append(item)
        return left


class SafePlanner(DefaultLoadPlanner):
    """As ``DefaultLoadPlanner``; plain values are read as ``torch.load`` does by default."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises UnpicklingError if the value is of an unknown type."""
        loaded = torch.load(value, weights_only=True)
        plain = type(value)()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
