"""The part of a nested state that a rank saves: tensors, plain values, and the plan of all ranks.

The next save of the same tensors reuses the plan and the metadata.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from zerocore._C import FileWriter
from zerocore.checkpoint.checksums import FileSums
from zerocore.checkpoint.commit import files
from zerocore.checkpoint.dcp.save_plan import Piece, SavePlan, Spread
from zerocore.checkpoint.dcp.torch_chunks import HEAD_NBYTES, frame
from zerocore.checkpoint.plain_values import saved_bytes
from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place
from zerocore.layout.save_ownership import SavedRanges
from zerocore.model.parameter_meshes import check_has_places
from zerocore.model.state import ShardState
from zerocore.tensor.placed import Placed, local_of

PART_NBYTES = 8 << 20  # bytes of one copy and one write
_SMALL_NBYTES = 64 << 10

Facts = Mapping[str, tuple[torch.dtype, Place | torch.Size]]  # each tensor's dtype, place or shape


class KeptPlan:
    """The plan of a model's last save, and its pickled metadata."""

    def __init__(self, state: ShardState) -> None:
        self.ranks = state.ranks
        self._parts = state.part_ranges
        check_has_places(state)
        self._spreads: dict[Any, Spread] = {}
        self._lock = threading.Lock()  # the copying thread and the writing one use the plan
        self._facts: Facts = {}
        self._plan = SavePlan({}, state.ranks.world_size)
        self._written: tuple[Any, ...] = ()
        self._metadata = b""

    def plan_of(self, facts: Facts) -> SavePlan:
        """Returns the plan of a save; the same object as long as the tensors are the same."""
        with self._lock:
            if facts is not self._facts:
                tensors = {key: (dtype, self._spread(of)) for key, (dtype, of) in facts.items()}
                plan = SavePlan(tensors, self.ranks.world_size)
                self._plan = self._plan if plan == self._plan else plan
                self._facts = facts
            return self._plan

    def metadata(
        self, plan: SavePlan, values: Mapping[str, tuple[int, int]], paths: Mapping[str, Any]
    ) -> bytes:
        """Returns ``plan.metadata(values, paths)`` pickled; reuses it while these are equal."""
        if (plan, values, paths) != self._written:
            self._metadata = pickle.dumps(plan.metadata(values, paths))
            self._written = plan, values, paths
        return self._metadata

    def _spread(self, of: Place | torch.Size) -> Spread:
        """Returns how a tensor is spread; the same object for all tensors that are spread alike."""
        key: Any = of
        if isinstance(of, Place):
            key = (of.fqn, of.whole_shape, of.strides, of.shard_range, of.group is None)
        if key not in self._spreads:
            self._spreads[key] = self._new_spread(of)
        return self._spreads[key]

    def _new_spread(self, of: Place | torch.Size) -> Spread:
        if not isinstance(of, Place):
            return Spread(tuple(of), SavedRanges(Cut.whole(of.numel())))
        if of.part is not None:
            parts = tuple(
                (part.origin, Spread(part.shape, part.ranges, of.strides))
                for part in self._parts[of.fqn]
            )
            return Spread(tuple(of.whole_shape), strides=of.strides, parts=parts)
        return Spread(tuple(of.global_shape), SavedRanges.on(self.ranks, of), of.strides)


@dataclass(frozen=True)
class SavedState:
    """A state to write. Threads compute most of it, so training does not wait for it."""

    kept: KeptPlan  # shared with the previous saves
    facts: Facts  # the same on all ranks
    tensors: Mapping[str, tuple[Tensor, int]]  # this rank's elements, 1-D, and the first's index
    plain: Mapping[str, Any]  # copies of values that are not tensors; on the first rank
    paths: Mapping[str, Any]  # each key's path in the nested state

    @property
    def rank(self) -> int:
        return self.kept.ranks.rank

    @property
    def plan(self) -> SavePlan:
        """The plan, the same on all ranks."""
        return self.kept.plan_of(self.facts)

    @cached_property
    def values(self) -> dict[str, bytes]:
        """The plain values as ``torch.save`` writes them, in the order in their file."""
        return {key: saved_bytes(value) for key, value in self.plain.items()}

    def metadata(self) -> bytes:
        places, offset = {}, 0
        for key, data in self.values.items():
            places[key] = (offset, len(data))
            offset += len(data)
        return self.kept.metadata(self.plan, places, self.paths)

    def digest(self) -> str:
        """Returns a text that is equal on all ranks if they save the same tensors."""
        facts = [
            f"{key} {dtype} {tuple(of.whole_shape if isinstance(of, Place) else of)}"
            for key, (dtype, of) in self.facts.items()
        ]
        return f"{len(facts)} tensors, {crc32(repr(facts).encode()):08x}"

    def watch_changes(self, state: ShardState) -> Callable[[], None]:
        """Returns a function that raises RuntimeError if a tensor has changed since, or a shard
        through its ``data``."""

        state_ref = ref(state)  # a model of zerocore.fsdp drops its state when it is moved

        def versions() -> dict[str, int]:
            current = {key: _version(local) for key, (local, _) in self.tensors.items()}
            state = state_ref()
            for unit in () if state is None else state.units:
                assert state is not None
                current[f"unit {unit.name}"] = state.engine.shards_version(unit.index)
            return current

        before = versions()

        def check() -> None:
            for key, version in versions().items():
                if before[key] != version:
                    raise RuntimeError(
                        f"'{key}' was changed during a background save, and not by an optimizer's "
                        "step, which waits. Call wait() on the result of save before you change it"
                    )

        return check

    def parts(self) -> Iterator[Tensor]:
        """Yields the memory that this rank writes, in the order in its file, in small parts."""
        for piece in self.plan.pieces_of(self.rank):
            local, begin = self.tensors[piece.key]
            start = piece.box.begin - begin
            if piece.box.numel > 0:
                yield from local[start : start + piece.box.numel].split(
                    PART_NBYTES // local.element_size()
                )

    def parts_on_cpu(self) -> Iterator[Tensor]:
        """Yields copies of :meth:`parts` on the CPU; the tensors must not change until the end."""
        for device in {local.device for local, _ in self.tensors.values()}:
            if device.type not in ("cpu", "meta"):  # this thread has another current stream
                torch.get_device_module(device).synchronize(device)
        return (part.cpu() for part in self.parts())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def saved_state(kept: KeptPlan, nested: dict[str, Any], copy: bool) -> SavedState:
    """Returns the state to save, on the model's memory. ``copy``: copies tensors that are not
    shards, because they may change."""
    flat, paths = flatten_state_dict(nested)
    is_first = kept.ranks.rank == 0
    facts: dict[str, tuple[torch.dtype, Place | torch.Size]] = {}
    tensors: dict[str, tuple[Tensor, int]] = {}
    plain: dict[str, Any] = {}
    for key, value in flat.items():
        if isinstance(value, Placed):
            local = local_of(value)
            facts[key] = (local.dtype, value.place)
            tensors[key] = (local, value.place.shard_range[0])
        elif isinstance(value, Tensor):
            facts[key] = (value.dtype, value.shape)
            if is_first:
                tensors[key] = (value.detach().to("cpu", copy=copy).reshape(-1), 0)
        elif is_first:
            plain[key] = deepcopy(value)
    return SavedState(kept, facts, tensors, plain, paths)


def write_rank_file(
    folder: Path, saved: SavedState, copies: Iterable[Tensor], begun: Callable[[], None]
) -> FileSums:
    """Writes a rank's file, durably, from copies of ``saved.parts()``; calls ``begun`` when the
    file has its disk space."""
    plan, rank = saved.plan, saved.rank
    file = files.create(folder / plan.file_name(rank))
    try:
        nbytes = plan.file_nbytes(rank)
        files.reserve(file, nbytes)
        writer = files.writer(file, nbytes)
        begun()
        parts = iter(copies)
        for piece in plan.pieces_of(rank):
            _write_piece(writer, plan, piece, parts)
        for _ in parts:  # the iterator's end raises the errors of the copies
            raise AssertionError("a part is left")
        files.finish(writer)
        files.flush(file)
        return FileSums(nbytes, writer.sums())
    finally:
        files.close(file)


def _write_piece(file: FileWriter, plan: SavePlan, piece: Piece, parts: Iterator[Tensor]) -> None:
    form, nbytes, begin = plan.form_of(piece), piece.nbytes, piece.offset + HEAD_NBYTES
    if nbytes <= _SMALL_NBYTES:  # in one call
        data = bytes(files.memory_of(next(parts))) if nbytes else b""
        head, tail = frame(*form, crc32(data))
        files.write(file, piece.offset, head + data + tail)
        return
    crc = done = 0
    while done < nbytes:
        part = next(parts)
        crc = files.write(file, begin + done, part, crc)
        done += part.nbytes
    head, tail = frame(*form, crc)
    files.write(file, piece.offset, head)
    files.write(file, begin + nbytes, tail)
