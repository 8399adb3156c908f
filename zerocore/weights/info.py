"""Computes names, shapes, dtypes and bytes of an export, before any communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import torch
from torch import nn

from zerocore.common.parsing import parse_nbytes
from zerocore.layout.place import Place
from zerocore.model.parameter_meshes import check_has_places
from zerocore.model.state import ShardState, ready_state_of
from zerocore.model.units import Param, Unit
from zerocore.state_dict import buffers_of, param_keys
from zerocore.tensor.rows import cuts_of, local_part, place_of
from zerocore.weights.export_steps import DEFAULT_BUCKET, Load, Sizes, peak_nbytes
from zerocore.weights.lora import BASE, PREFIX, Adapter, find_adapters, saved_modules

Name = str | tuple[str, int] | None
Names = Callable[[str], Name] | Mapping[str, Name]
_SUM_ALIGNMENT = 16  # bytes
_SUM_FACTOR = 3  # an all-reduce of less than a third of a unit moves less than its gather


@dataclass(frozen=True)
class Exported:
    """A tensor of an export."""

    name: str  # the receiver's name for it
    shape: torch.Size  # shape of the full tensor
    dtype: torch.dtype  # dtype of the exported tensor
    key: str = field(repr=False)  # in the state dict; the first if there are several
    positions: tuple[int, ...] = field(repr=False)  # positions of its parameters in the unit
    adapters: tuple[Adapter, ...] = field(repr=False)
    copies: bool = field(repr=False)  # a copy, not a view of gathered memory

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def read(self) -> set[int]:
        """Positions of all parameters that the tensor is made from."""
        return {*self.positions, *(p for a in self.adapters for p in (a.first, a.second))}


@dataclass(frozen=True)
class UnitExport:
    """The tensors of an export from one unit."""

    unit: int  # its index; -1 for the model's buffers, which all ranks hold
    entries: tuple[Exported, ...]
    sums: int = 0  # bytes of an all-reduce that replaces the unit's gather; 0 for the gather
    held_nbytes: int = 0  # as in :class:`Load`
    received_nbytes: int = 0

    @property
    def load(self) -> Load:
        """Its sizes."""
        sizes = tuple(Sizes(entry.nbytes, entry.copies) for entry in self.entries)
        return Load(self.held_nbytes, self.received_nbytes, sizes)


@dataclass
class ExportInfo:
    """The tensors of an export; see :func:`export_info`."""

    units: tuple[UnitExport, ...] = field(repr=False)
    owner: object = field(repr=False, compare=False)  # identifies the model, see owner_of
    is_agreed: bool = field(default=False, repr=False, compare=False)  # ranks have compared it

    @property
    def tensors(self) -> list[Exported]:
        """All tensors, in the order of the export."""
        return [entry for unit in self.units for entry in unit.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors)

    def peak_nbytes(self, max_bytes: str | int = DEFAULT_BUCKET) -> int:
        """Returns the most device memory that ``export(max_bytes=...)`` takes at a time.

        It counts gathered units and copies, not the model's own memory.
        """
        return peak_nbytes([unit.load for unit in self.units], parse_nbytes(max_bytes, "max_bytes"))

    def facts(self) -> list[str]:
        """Returns texts that ranks compare."""
        return [f"{entry.name} {tuple(entry.shape)} {entry.dtype}" for entry in self.tensors]


def export_info(
    model: nn.Module,
    *,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    merge: str | None = None,
) -> ExportInfo:
    """Describes the tensors of :func:`export` with the same arguments; communicates nothing.

    If a ``zerocore.fsdp`` model has run no forward, it first makes the engine, on all ranks.

    Args:
        names: maps names in ``model.state_dict()`` to the receiver's: a dict, which keeps names
            that it lacks, or a function. None leaves a tensor out. A pair ``(name, index)`` makes
            it a part of a tensor of that name, along the first dimension; see :func:`fused`.
        dtype: of floating-point parameters; by default, the dtype that layers compute with.
        merge: ``"lora"`` adds PEFT's adapters to the weights, and uses the base model's names.

    Raises:
        ValueError: the model is not sharded; two tensors have one name; parts of one tensor are in
            several units; adapters cannot be merged.
    """
    state = ready_state_of(model)
    _check_places(state)
    if merge not in (None, "lora"):
        raise ValueError(f'merge must be None or "lora", got {merge!r}')
    return _Builder(model, state, _namer(names), dtype, merge is not None).build()


def fused(
    parts: Mapping[str, Sequence[str]], names: Names | None = None
) -> Callable[[str], tuple[str, int] | str | None]:
    """Returns ``names=`` that fuses several layers' tensors into one, as inference engines do.

    ``fused({"gate_up_proj": ("gate_proj", "up_proj")})`` concatenates the tensors of both layers
    along the first dimension.

    Args:
        names: a mapping to apply first.
    """
    places = {part: (whole, at) for whole, seq in parts.items() for at, part in enumerate(seq)}
    rename = _namer(names)

    def name_of(name: str) -> tuple[str, int] | str | None:
        renamed = rename(name)
        if not isinstance(renamed, str):
            return renamed
        pieces = renamed.split(".")
        for at, piece in enumerate(pieces):
            if piece in places:
                whole, index = places[piece]
                return ".".join([*pieces[:at], whole, *pieces[at + 1 :]]), index
        return renamed

    return name_of


def owner_of(state: ShardState) -> object:
    """Returns an object that identifies the model, also in a pickled :class:`ExportInfo`."""
    return state.kept.setdefault("owner of exports", object())


def is_whole(param: Param) -> bool:
    """Whether a gather of the unit yields the tensor of ``state_dict()``, or its part along one
    dimension. If not, only the DTensor itself can gather it."""
    if not is_rows(param):
        return True
    gathers_itself = hasattr(local_part(param.shard), "fsdp_pre_all_gather")
    return not gathers_itself and not cuts_of(param.shard)


def is_view(param: Param) -> bool:
    """Whether the gathered parameter is the tensor of ``state_dict()``."""
    return is_whole(param) and (is_rows(param) or param.shard.place.part is None)


def is_rows(param: Param) -> bool:
    return hasattr(param.shard, "_spec")


def place_in_unit(param: Param) -> Place:
    """Returns the place of a parameter's shard."""
    return cast(Place, place_of(param.shard))


def _namer(names: Names | None) -> Callable[[str], Name]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    return lambda name: names.get(name, name)


def _check_places(state: ShardState) -> None:
    for extension in () if state.kind.by_rows else state.extensions:  # DTensors gather rows
        raise NotImplementedError(
            f"parameter '{extension.fqn}' gathers itself, which exports do not support; use "
            "zerocore.full_state_dict"
        )
    check_has_places(state)


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        state: ShardState,
        name_of: Callable[[str], Name],
        dtype: torch.dtype | None,
        merges: bool,
    ) -> None:
        self.model, self.state, self.name_of, self.dtype = model, state, name_of, dtype
        self.merges = merges
        self.keys = param_keys(model, state)
        self.sources: dict[str, str] = {}  # the first key of each exported name
        self.params = {id(param.object): param for param in state.params()}
        adapters, inner = find_adapters(model) if merges else ({}, set())
        self.saved = saved_modules(model) if merges else {}
        self.adapters = {self.params[key]: of_weight for key, of_weight in adapters.items()}
        self.inner = {self.params[key] for key in inner if key in self.params}

    def build(self) -> ExportInfo:
        units = [self.unit(unit) for unit in self.state.units]
        units.append(UnitExport(-1, tuple(self.buffers())))
        exported = tuple(unit for unit in units if unit.entries)
        return ExportInfo(exported, owner_of(self.state))

    def buffers(self) -> list[Exported]:
        entries = []
        for key, value in buffers_of(self.model, self.keys).items():
            name = self.name(key)
            if name is not None:
                text = name if isinstance(name, str) else name[0]
                self.claim(text, key)
                entries.append(Exported(text, value.shape, value.dtype, key, (), (), copies=False))
        return entries

    def name(self, key: str) -> Name:
        for prefix, taken in self.saved.items():
            if key.startswith(prefix):
                if not key.startswith(taken):
                    return None
                key = prefix + key.removeprefix(taken)
        if self.merges:
            key = key.removeprefix(PREFIX).replace(f"{BASE}.", ".")
        return self.name_of(key)

    def claim(self, name: str, source: str) -> None:
        other = self.sources.setdefault(name, source)
        if other != source:
            raise ValueError(
                f"names: '{other}' and '{source}' both become '{name}'; give each a name of its "
                "own, or None to leave it out. Parts of one tensor must be in one unit"
            )

    def unit(self, unit: Unit) -> UnitExport:
        parts: dict[str, dict[int, int]] = {}  # name -> index in it -> position
        for position, param in enumerate(unit.params):
            if param in self.inner:
                continue
            for key in self.keys[param]:
                if (name := self.name(key)) is None:
                    continue
                text, index = (name, 0) if isinstance(name, str) else name
                if isinstance(name, str) or text not in parts:
                    self.claim(text, key)
                if index in parts.setdefault(text, {}):
                    raise ValueError(f"names: part {index} of '{text}' is given twice, by '{key}'")
                parts[text][index] = position
                break  # a tied parameter only once
        return self.loaded(unit, [self.entry(unit, *named) for named in parts.items()])

    def entry(self, unit: Unit, name: str, parts: dict[int, int]) -> Exported:
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(
                f"names: '{name}' has the parts {sorted(parts)} in unit '{unit.name}'; all parts "
                "of a fused tensor must be in one unit, numbered from 0"
            )
        positions = tuple(parts[index] for index in range(len(parts)))
        params = [unit.params[position] for position in positions]
        shapes = [param.whole_shape for param in params]
        model_dtype = params[0].types.model
        dtype = self.dtype if self.dtype and model_dtype.is_floating_point else model_dtype
        adapters = self.adapters_of(unit, params[0]) if len(params) == 1 else ()
        if len(params) > 1 and any(param in self.adapters for param in params):
            raise ValueError(f"names: '{name}' is fused and has adapters; export one or the other")
        rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else 0
        shape = torch.Size((rows, *shapes[0][1:])) if rows else shapes[0]
        copies = dtype != model_dtype or rows > 0 or bool(adapters) or not is_view(params[0])
        key = self.keys[params[0]][0]
        return Exported(name, shape, dtype, key, positions, adapters, copies)

    def adapters_of(self, unit: Unit, param: Param) -> tuple[Adapter, ...]:
        positions = {other: position for position, other in enumerate(unit.params)}
        adapters = []
        for adapter in self.adapters.get(param, ()):
            pair = self.params[adapter.first], self.params[adapter.second]
            if not all(matrix in positions for matrix in pair):
                raise ValueError(
                    f"merge=\"lora\": the adapter of '{param.fqn}' is in another unit than the "
                    "weight; let units= keep a block together"
                )
            adapters.append(replace(adapter, first=positions[pair[0]], second=positions[pair[1]]))
        return tuple(adapters)

    def loaded(self, unit: Unit, entries: list[Exported]) -> UnitExport:
        engine = self.state.engine
        if not engine.releases(unit.index):
            return UnitExport(unit.index, tuple(entries))
        layout = engine.layout(unit.index)
        read = set().union(*(entry.read for entry in entries))
        params = [unit.params[position] for position in read]
        sums = sum(padded_nbytes(param) for param in params)
        # An all-reduce moves exact values; with gather_dtype, layers compute with decoded ones.
        gathers = any(param.types.gather or not is_whole(param) for param in params)
        if sums * _SUM_FACTOR > layout.nbytes or gathers:
            sums = 0
        received = 0 if sums else layout.received_nbytes
        return UnitExport(unit.index, tuple(entries), sums, sums or layout.nbytes, received)


def padded_nbytes(param: Param) -> int:
    """Returns the bytes of a parameter in an all-reduce: in the layers' dtype, aligned."""
    nbytes = param.full.numel() * param.types.model.itemsize
    return -(-nbytes // _SUM_ALIGNMENT) * _SUM_ALIGNMENT
