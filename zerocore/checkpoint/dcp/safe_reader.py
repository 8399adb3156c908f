"""Reads tensors of ``torch.distributed.checkpoint``: those bytes of them that are needed.

Torch's reader has other means, which could run code: such bytes are read here or refused.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from zerocore.checkpoint.byte_ranges import in_threads
from zerocore.checkpoint.dcp.chunk_reads import locate, read_box
from zerocore.checkpoint.dcp.contents import Contents, Part
from zerocore.checkpoint.safe_files import named, opened
from zerocore.checkpoint.safe_pickles import load_plain


class SafeReader(FileSystemReader):
    """As ``FileSystemReader``, of contents that are known, with chunks read in part."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents.folder)
        self._metadata = contents.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError or ValueError that names file and key."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            self._read_items(Path(self.path) / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        ordered = sorted(items, key=lambda item: self.storage_data[item.storage_index].offset)
        tensors = [item for item in ordered if item.type != LoadItemType.BYTE_IO]
        wanted = [(item, planner.resolve_tensor(item).detach()) for item in tensors]
        on_cpu = all(target.device.type == "cpu" for _, target in wanted)
        with opened(path) as file:

            def read(one: tuple[ReadItem, Tensor]) -> None:
                with named(path, f"cannot be read at '{one[0].storage_index.fqn}'"):
                    self._read_tensor(file, *one)

            # A device's copies go to this thread's stream.
            done: Iterator[None] = in_threads(read, wanted) if on_cpu else map(read, wanted)
            for (item, target), _ in zip(wanted, done, strict=True):
                planner.commit_tensor(item, target)
            for item in ordered:
                if item.type == LoadItemType.BYTE_IO:
                    info = self.storage_data[item.storage_index]
                    data = Part(file, info.offset, info.length).read()
                    with named(path, f"cannot be read at '{item.storage_index.fqn}'"):
                        planner.load_bytes(item, io.BytesIO(data))

    def _read_tensor(self, file: Any, item: ReadItem, target: Tensor) -> None:
        info = self.storage_data[item.storage_index]
        facts: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if info.transform_descriptors:
            raise ValueError("it went through an extension of torch's writer, which is not known")
        offset = item.storage_index.offset
        form = next((tuple(chunk.sizes) for chunk in facts.chunks if chunk.offsets == offset), None)
        chunk = locate(file.fileno(), info.offset, info.length)
        if chunk is not None:
            if (chunk.dtype, chunk.sizes) != (facts.properties.dtype, form):
                raise ValueError(f"it is {chunk.dtype} {chunk.sizes}, not what .metadata says")
            read_box(file.fileno(), chunk, item.storage_offsets, item.lengths, target)
            return
        loaded = load_plain(Part(file, info.offset, info.length), info.length)
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != form:
            raise ValueError("it is no tensor of the shape that .metadata says")
        for dim, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            loaded = loaded.narrow(dim, begin, size)
        target.copy_(loaded)


class SafePlanner(DefaultLoadPlanner):
    """As ``DefaultLoadPlanner``; plain values are read as ``torch.load`` does by default."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises UnpicklingError if the value is of an unknown type."""
        loaded = load_plain(value, value.getbuffer().nbytes)
        plain = type(value)()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_tensors(state: dict[str, Any], contents: Contents) -> None:
    """Reads what this rank needs of the tensors; asks no other rank. Errors name file and key."""
    with quiet():
        try:
            load(state, storage_reader=SafeReader(contents), planner=SafePlanner(), no_dist=True)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                raise cause from None


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns where one process saves for itself, as it is told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
