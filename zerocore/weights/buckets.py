"""Exports the full weights of a sharded model, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore.common.agreement import together
from zerocore.common.alarm import operation, waiting
from zerocore.common.parsing import parse_nbytes
from zerocore.model.state import ShardState, ready_state_of
from zerocore.model.units import Param, Unit
from zerocore.tensor.rows import elements_of
from zerocore.weights.export_steps import DEFAULT_BUCKET, Op, export_steps
from zerocore.weights.info import (
    Exported,
    ExportInfo,
    Names,
    UnitExport,
    export_info,
    is_rows,
    is_view,
    is_whole,
    owner_of,
    padded_nbytes,
    place_in_unit,
)
from zerocore.weights.parked import memory_of

Token = dict[str, int]
_OPEN = "export"  # key in ``state.kept`` of the running export


class Bucket(dict[str, Tensor]):
    """Full tensors by name: views that are valid until the next bucket or :meth:`release`.

    On a device, they are ready for work of the current stream.
    """

    _drop: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.values())

    def release(self) -> None:
        """Frees the memory of the tensors; do not read them afterwards."""
        self.clear()
        if self._drop is not None:
            drop, self._drop = self._drop, None
            drop()


def export(
    model: nn.Module,
    *,
    max_bytes: str | int = DEFAULT_BUCKET,
    to: str | int = "all",
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    merge: str | None = None,
    since: Token | None = None,
    info: ExportInfo | None = None,
) -> Export:
    """Exports full weights, as layers compute with them, in buckets of ``{name: tensor}``.

    All ranks must call it, also while the model is parked. It gathers each unit in one collective,
    ahead of its turn if ``max_bytes`` leaves room. It copies only tensors that are cast, fused,
    merged or a part of a larger tensor. Tied parameters have their first name; buffers come last.

    Args:
        max_bytes: of a bucket, unless one tensor is larger.
        to: ``"all"`` ranks get buckets, and take all of them or stop at the same one; or one rank
            of the model gets them, may stop, and then completes the others' collectives.
        names, dtype, merge: as for :func:`export_info`.
        since: :attr:`Export.token` of an earlier export, to get only weights that have changed.
        info: from :func:`export_info`, instead of names, dtype and merge.

    Raises:
        ValueError: as :func:`export_info`; ``to`` is not a rank; ``info`` is of another model.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    state = ready_state_of(model)
    if info is not None and (names, dtype, merge) != (None, None, None):
        raise ValueError("export: pass info=, or names=, dtype= and merge=, not both")
    if info is None or not info.is_agreed:
        with operation("export"), together(state.ranks.groups, state.device) as facts:
            nbytes = _checked(state, info, max_bytes, to)
            info = info or export_info(model, names=names, dtype=dtype, merge=merge)
            facts += [nbytes, to, *info.facts()]
        info.is_agreed = True
    nbytes = _checked(state, info, max_bytes, to)
    earlier = state.kept.get(_OPEN, lambda: None)()
    if earlier is not None:
        earlier.close()
    result = Export(state, model, info, nbytes, to, since)
    state.kept[_OPEN] = ref(result)
    return result


def _checked(state: ShardState, info: ExportInfo | None, max_bytes: str | int, to: Any) -> int:
    """Returns the bytes of a bucket; raises ValueError if an argument does not fit the model."""
    if to != "all" and to not in range(state.world_size):
        raise ValueError(f'to must be "all" or a rank of the model, got {to!r}')
    if info is not None and info.owner is not owner_of(state):
        raise ValueError("info belongs to another model or sharding; call export_info(model) again")
    return parse_nbytes(max_bytes, "max_bytes")


class Export(Iterator[Bucket]):
    """The buckets of :func:`export`.

    Attributes:
        token: versions of the weights, for ``since=`` of a later export.
    """

    def __init__(
        self,
        state: ShardState,
        model: nn.Module,
        info: ExportInfo,
        max_nbytes: int,
        to: str | int,
        since: Token | None,
    ) -> None:
        self.token: Token = _versions(state, info)
        before = since or {}
        units = [_changed(unit, self.token, before) for unit in info.units]
        units = [unit for unit in units if unit.entries]
        self._copied = {entry.name for unit in units for entry in unit.entries if entry.copies}
        self._device = state.device
        self._takes = to in ("all", state.rank)
        self._is_for_one = to != "all"
        self._buckets = _recycling(state, _run(state, model, units, max_nbytes, self._takes))

    def __next__(self) -> Bucket:
        with operation("export"), torch.no_grad():
            return next(self._buckets)

    def __iter__(self) -> Export:
        return self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors, one at a time; the tensors stay valid.

        Views are copied. The current stream at each turn waits for the stream of the turn before.
        """
        stream = self._stream()
        for bucket in self:
            for name, value in bucket.items():
                yield name, value if name in self._copied else value.clone()
                if stream is not None and (now := self._stream()) != stream:
                    now.wait_stream(stream)
                    stream = now

    def _stream(self) -> Any:
        if self._device.type == "cpu":
            return None
        return torch.get_device_module(self._device).current_stream()

    def close(self) -> None:
        """Ends the export before its last bucket, and frees gathered units."""
        if self._is_for_one and self._takes:
            for bucket in self:  # completes the other ranks' collectives
                bucket.release()
        self._buckets.close()

    def __del__(self) -> None:
        self.close()


def _versions(state: ShardState, info: ExportInfo) -> Token:
    return {
        entry.name: sum(state.engine.param_version(unit.unit, p) for p in sorted(entry.read))
        for unit in info.units
        for entry in unit.entries
        if unit.unit >= 0
    }


def _changed(unit: UnitExport, token: Token, since: Token) -> UnitExport:
    """Returns the unit with only the tensors whose versions differ; buffers have no versions."""
    if not since:
        return unit
    changed = [
        entry for entry in unit.entries if token.get(entry.name) != since.get(entry.name, -1)
    ]
    return replace(unit, entries=tuple(changed))


def _recycling(
    state: ShardState, buckets: Generator[Bucket, None, None]
) -> Generator[Bucket, None, None]:
    """Yields the buckets; units reuse the memory of earlier ones."""
    state.engine.set_recycling(True)
    try:
        yield from buckets
    finally:
        state.engine.set_recycling(False)


def _run(
    state: ShardState, model: nn.Module, units: list[UnitExport], max_nbytes: int, takes: bool
) -> Generator[Bucket, None, None]:
    sources = [_source(state, model, unit) for unit in units]
    steps = export_steps([unit.load for unit in units], max_nbytes)
    held: set[int] = set()
    bucket = Bucket()
    done = 0

    def drops() -> None:
        nonlocal done
        while done < len(steps) and steps[done].op is Op.DROP:
            held.discard(steps[done].load)
            sources[steps[done].load].drop()
            done += 1

    try:
        while done < len(steps):
            step = steps[done]
            done += 1
            if step.op is Op.BEGIN:
                held.add(step.load)
                sources[step.load].begin()
            elif step.op is Op.WAIT:
                sources[step.load].wait()
            elif step.op is Op.DROP:
                done -= 1
                drops()
            elif step.op is Op.ADD:
                entry = units[step.load].entries[step.entry]
                if takes or sources[step.load].asks_others(entry):
                    bucket[entry.name] = sources[step.load].value(entry)
            elif takes:
                bucket._drop = drops
                yield bucket
                bucket.release()
                bucket = Bucket()
            else:
                bucket.clear()
    finally:
        bucket.clear()
        for load in held:
            sources[load].drop()


class _Source:
    """The source of a unit's tensors: here, of the model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def begin(self) -> None:
        """Begins the gather."""
        self.buffers = self.model.state_dict(keep_vars=True)

    def wait(self) -> None:
        """Waits for the gather; values may be read afterwards."""

    def drop(self) -> None:
        """Frees the gathered memory; values may not be read afterwards."""

    def asks_others(self, entry: Exported) -> bool:
        """Whether to read the value is collective."""
        return False

    def value(self, entry: Exported) -> Tensor:
        """Returns a full tensor."""
        return cast(Tensor, self.buffers[entry.key]).detach()


@dataclass
class _Gather(_Source):
    """The engine's gather of a whole unit."""

    state: ShardState
    unit: Unit

    def begin(self) -> None:
        memory_of(self.state, self.unit.index).bring(1)
        self.state.engine.begin_hold(self.unit.index)

    def wait(self) -> None:
        self.state.engine.wait_held(self.unit.index)

    def drop(self) -> None:
        self.state.engine.release_unsharded([self.unit.index], False)
        memory_of(self.state, self.unit.index).leave()

    def asks_others(self, entry: Exported) -> bool:
        return not all(is_view(self.unit.params[position]) for position in entry.read)

    def value(self, entry: Exported) -> Tensor:
        values = [self.whole(position) for position in entry.positions]
        if not entry.copies:
            return values[0]
        if len(values) > 1:
            return torch.cat([value.to(entry.dtype) for value in values])
        if not entry.adapters:
            return values[0].to(entry.dtype)
        merged = values[0].clone()
        for adapter in entry.adapters:
            adapter.add_to(merged, self.whole(adapter.first), self.whole(adapter.second))
        return merged.to(entry.dtype)

    def whole(self, position: int) -> Tensor:
        """Returns a parameter as in the state dict, in the dtype that layers compute with."""
        param = self.unit.params[position]
        if not is_whole(param):
            return cast(Tensor, param.shard.full_tensor().detach().to(param.types.model))
        full = self.full(position, param)
        return full if is_view(param) else param.shard.place.whole_of(full)

    def full(self, position: int, param: Param) -> Tensor:
        """Returns the full value of the engine's parameter."""
        full, place = param.full.detach(), place_in_unit(param)
        if place.strides is None or not is_rows(param):
            return full
        return full.as_strided(place.global_shape, place.strides, full.storage_offset())


@dataclass
class _Sum(_Gather):
    """An all-reduce of only the exported parameters, if these are a small part of the unit: the
    sum, as bytes, of each rank's elements with zeros elsewhere."""

    read: list[int]
    flat: Tensor | None = None
    work: Any = None

    def begin(self) -> None:
        params = {position: self.unit.params[position] for position in self.read}
        self.offsets, end = {}, 0
        for position, param in params.items():
            self.offsets[position] = end
            end += padded_nbytes(param)
        self.flat = torch.zeros(end, dtype=torch.uint8, device=self.state.device)
        memory_of(self.state, self.unit.index).bring()
        for position, param in params.items():
            start, stop = place_in_unit(param).shard_range
            part = elements_of(param.shard, param.shard)
            self.elements(position, param)[start:stop].copy_(part)
        memory_of(self.state, self.unit.index).leave()
        group = place_in_unit(next(iter(params.values()))).group
        if group is not None:
            with waiting(group, "an all-reduce of weights"):
                self.work = dist.all_reduce(self.flat, group=group, async_op=True)
            self.group = group

    def wait(self) -> None:
        if self.work is not None:
            with waiting(self.group, "an all-reduce of weights"):
                self.work.wait()

    def drop(self) -> None:
        self.flat = self.work = None

    def elements(self, position: int, param: Param) -> Tensor:
        assert self.flat is not None
        nbytes = param.full.numel() * param.types.model.itemsize
        begin = self.offsets[position]
        return self.flat[begin : begin + nbytes].view(param.types.model)

    def full(self, position: int, param: Param) -> Tensor:
        place = place_in_unit(param)
        elements = self.elements(position, param)
        if place.strides is None:
            return elements.view(place.global_shape)
        return elements.as_strided(place.global_shape, place.strides)


def _source(state: ShardState, model: nn.Module, unit: UnitExport) -> _Source:
    if unit.unit < 0:
        return _Source(model)
    if not unit.sums:
        return _Gather(state, state.units[unit.unit])
    read = sorted({position for entry in unit.entries for position in entry.read})
    return _Sum(state, state.units[unit.unit], read)
