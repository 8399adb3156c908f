"""Reads files of ``torch.distributed.checkpoint`` without running code that they might hold.

Their metadata and their plain values are pickles. Here only what such a checkpoint needs is made
of them; anything else is an error.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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


class SafeReader(FileSystemReader):
    """As ``FileSystemReader``, with metadata of known types only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises ValueError if the file is broken or holds anything else."""
        path = self.fs.concat_path(self.path, ".metadata")
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
        if getattr(metadata, "storage_meta", None) is not None:
            metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """As ``DefaultLoadPlanner``; plain values are read as ``torch.load`` does by default."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises UnpicklingError if the value is of an unknown type."""
        loaded = torch.load(value, weights_only=True)
        plain = type(value)()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
