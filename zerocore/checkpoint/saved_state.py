"""What a rank saves of a nested state: its parts of tensors, plain values, and the plan of all."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from zerocore.checkpoint import files
from zerocore.checkpoint.save_plan import Piece, SavePlan, Spread, box_strides
from zerocore.checkpoint.torch_chunks import data_offset, frame
from zerocore.model.state import ShardState
from zerocore.tensor.place import Place, Placed, local_of
from zerocore.tensor.shares import owned_ranges, saved_ranges

PART_NBYTES = 8 << 20  # what is copied and written at a time
_SMALL_NBYTES = 64 << 10


@dataclass(frozen=True)
class SavedState:
    """A state as it goes into the files.

    Attributes:
        plan: the same on all ranks, but for the values.
        rank: which of them this is.
        tensors: this rank's elements of each tensor, plain and 1-D, and where they begin.
        values: what is no tensor, as ``torch.save`` writes it; on the first rank.
        paths: of every key in the nested state.
    """

    plan: SavePlan
    rank: int
    tensors: Mapping[str, tuple[Tensor, int]]
    values: Mapping[str, bytes]
    paths: Mapping[str, Any]

    @property
    def front(self) -> bytes:
        """The values one after the other, as they stand at the begin of the first file."""
        return b"".join(self.values.values())

    @property
    def value_places(self) -> dict[str, tuple[int, int]]:
        """Offset and length of each value."""
        places, offset = {}, 0
        for key, data in self.values.items():
            places[key] = (offset, len(data))
            offset += len(data)
        return places

    def digest(self) -> str:
        """The same on all ranks if they save the same tensors."""
        facts = [f"{key} {dtype} {s.shape}" for key, (dtype, s) in self.plan.tensors.items()]
        return f"{len(facts)} tensors, {crc32(repr(facts).encode()):08x}"

    def watch_changes(self) -> Callable[[], None]:
        """Returns what raises RuntimeError if a tensor has changed in the meantime."""
        before = [local._version for local, _ in self.tensors.values()]

        def check() -> None:
            for (key, (local, _)), version in zip(self.tensors.items(), before, strict=True):
                if local._version != version:
                    raise RuntimeError(
                        f"'{key}' was changed while it was being saved, and not by an optimizer's "
                        "step, which waits. Call wait() of what save returned before changing it"
                    )

        return check

    def parts(self) -> Iterator[Tensor]:
        """The memory that this rank writes, in the order in its file, in small parts."""
        for piece in self.plan.pieces_of(self.rank):
            local, begin = self.tensors[piece.key]
            start = piece.box.begin - begin
            if piece.box.numel > 0:
                yield from local[start : start + piece.box.numel].split(
                    PART_NBYTES // local.element_size()
                )


def saved_state(state: ShardState, nested: dict[str, Any], copy: bool) -> SavedState:
    """The state of a model's ranks, on its own memory.

    Args:
        nested: shards, and what is equal on all ranks, of which the first one's is saved.
        copy: whether to copy what is no shard, which may change at any time.
    """
    flat, paths = flatten_state_dict(nested)
    spreads = _Spreads(state)
    plans: dict[str, tuple[torch.dtype, Spread]] = {}
    tensors: dict[str, tuple[Tensor, int]] = {}
    values: dict[str, bytes] = {}
    for key, value in flat.items():
        if isinstance(value, Placed):
            plans[key] = (value.dtype, spreads.of(value.place))
            tensors[key] = (local_of(value), value.place.shard_range[0])
        elif isinstance(value, Tensor):
            plans[key] = (value.dtype, Spread(tuple(value.shape), ((0, 0, value.numel()),)))
            if state.rank == 0:
                plain = value.detach().to("cpu", copy=copy)
                tensors[key] = (plain.reshape(-1), 0)
        elif state.rank == 0:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            values[key] = buffer.getvalue()
    plan = SavePlan(plans, state.world_size, sum(map(len, values.values())))
    return SavedState(plan, state.rank, tensors, values, paths)


class _Spreads:
    """How parameters, and the states of their optimizer, are spread over the ranks."""

    def __init__(self, state: ShardState) -> None:
        self._params = {param.fqn: param.shard for param in state.params()}
        self._state = state
        self._known: dict[tuple[Any, ...], Spread] = {}

    def of(self, place: Place) -> Spread:
        """One object for all tensors that are spread alike."""
        key = (place.fqn, place.global_shape)
        if key not in self._known:
            self._known[key] = self._find(place)
        return self._known[key]

    def _find(self, place: Place) -> Spread:
        ranks, numel = self._state.ranks, place.global_shape.numel()
        shape = tuple(place.global_shape)
        if place.group is None:
            ranges = saved_ranges([(0, 0, numel)], 1, ranks.world_size)
            return Spread(shape, ranges, place.strides)
        param = self._params[place.fqn]
        owned = owned_ranges(self._state.engine.layout(param.unit), param.position)
        ranges = saved_ranges(owned, ranks.num_shards, ranks.num_replicas)
        return Spread(shape, ranges, place.strides)


def write_rank_file(folder: Path, saved: SavedState, parts: Iterable[Tensor]) -> None:
    """Writes one rank's file and makes it durable.

    Args:
        parts: as of ``saved.parts()``, on the CPU.
    """
    file = files.create(folder / saved.plan.file_name(saved.rank))
    try:
        if saved.front:
            files.write(file, 0, saved.front)
        waiting = iter(parts)
        for piece in saved.plan.pieces_of(saved.rank):
            _write_piece(file, saved.plan, piece, waiting)
        for _ in waiting:  # its end says whether all was well
            raise AssertionError("a part is left")
        files.flush(file)
    finally:
        files.close(file)


def _write_piece(file: int, plan: SavePlan, piece: Piece, parts: Iterator[Tensor]) -> None:
    dtype, spread = plan.tensors[piece.key]
    strides = box_strides(piece.box, spread.strides, spread.shape)
    nbytes = piece.box.numel * dtype.itemsize
    begin = piece.offset + data_offset()
    if nbytes <= _SMALL_NBYTES:  # in one call
        data = files.bytes_of(next(parts)) if nbytes else b""
        made = frame(dtype, piece.box.sizes, strides, crc32(data))
        files.write(file, piece.offset, made.head + data + made.tail)
        return
    crc = done = 0
    while done < nbytes:
        part = next(parts)
        crc = files.write(file, begin + done, part, crc)
        done += part.nbytes
    made = frame(dtype, piece.box.sizes, strides, crc)
    files.write(file, piece.offset, made.head)
    files.write(file, begin + nbytes, made.tail)
