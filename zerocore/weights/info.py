"""Names, shapes, dtypes and bytes of an export, known before anything is communicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import torch
from torch import nn

from zerocore.common.quantities import parse_nbytes
from zerocore.layout.place import Place
from zerocore.model.parameter_meshes import check_has_places
from zerocore.model.state import Param, ShardState, Unit, ready_state_of
from zerocore.state_dict import buffers_of, param_keys
from zerocore.tensor.rows import cuts_of, local_part, place_of
from zerocore.weights.export_steps import DEFAULT_BUCKET, Load, Sizes, peak_nbytes
from zerocore.weights.lora import BASE, PREFIX, Adapter, find_adapters, saved_modules

Name = str | tuple[str, int] | None
Names = Callable[[str], Name] | Mapping[str, Name]
_SUM_ALIGNMENT = 16  # bytes
_SUM_FACTOR = 3  # an all-reduce of a part moves less than a gather of all from here on


@dataclass(frozen=True)
class Exported:
    """A tensor of an export."""

    name: str  # as the receiver has it
    shape: torch.Size  # of the full tensor
    dtype: torch.dtype  # as it is given out
    key: str = field(repr=False)  # in the state dict, the first if there are several
    positions: tuple[int, ...] = field(repr=False)  # of its parameters in the unit
    adapters: tuple[Adapter, ...] = field(repr=False)
    copies: bool = field(repr=False)  # it is no view of gathered memory

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def read(self) -> set[int]:
        """All parameters that it takes."""
        return {*self.positions, *(p for a in self.adapters for p in (a.first, a.second))}


@dataclass(frozen=True)
class UnitExport:
    """The part of an export that one unit gives."""

    unit: int  # its index; -1 for the model's buffers, which all ranks hold
    entries: tuple[Exported, ...]
    sums: int = 0  # bytes of an all-reduce in the place of the gather of all; 0 for the gather
    held_nbytes: int = 0  # as of a Load
    received_nbytes: int = 0

    @property
    def load(self) -> Load:
        """Its sizes."""
        sizes = tuple(Sizes(each.nbytes, each.copies) for each in self.entries)
        return Load(self.held_nbytes, self.received_nbytes, sizes)


@dataclass
class ExportInfo:
    """The tensors of an export; see :func:`export_info`."""

    units: tuple[UnitExport, ...] = field(repr=False)
    owner: object = field(repr=False, compare=False)  # of the model, see owner_of
    is_agreed: bool = field(default=False, repr=False, compare=False)  # after the first use

    @property
    def tensors(self) -> list[Exported]:
        """All tensors, in the order in which they come."""
        return [entry for unit in self.units for entry in unit.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors)

    def peak_nbytes(self, max_bytes: str | int = DEFAULT_BUCKET) -> int:
        """The most bytes of device memory that ``export(max_bytes=...)`` takes at a time.

        Counts gathered units and copies, not the model's own memory.
        """
        return peak_nbytes([unit.load for unit in self.units], parse_nbytes(max_bytes, "max_bytes"))

    def facts(self) -> list[str]:
        """Texts that ranks compare."""
        return [f"{each.name} {tuple(each.shape)} {each.dtype}" for each in self.tensors]


def export_info(
    model: nn.Module,
    *,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    merge: str | None = None,
) -> ExportInfo:
    """The tensors that :func:`export` with the same arguments gives out; communicates nothing.

    Of a model of ``zerocore.fsdp`` that has run no forward it first makes the engine, on all ranks.

    Args:
        names: what the receiver calls a tensor of ``model.state_dict()``: a dict, of which missing
            names stay, or a function. None leaves the tensor out; a pair ``(name, index)`` makes it
            a part of a tensor of that name, along the first dimension; see :func:`fused`.
        dtype: of floating-point parameters; as layers compute with them by default.
        merge: ``"lora"`` adds the adapters of PEFT to the weights, whose names become those of the
            base model.

    Raises:
        ValueError: the model is not sharded; two tensors of one name; parts of one tensor in
            several units; adapters that cannot be merged.
    """
    state = ready_state_of(model)
    _check_places(state)
    if merge not in (None, "lora"):
        raise ValueError(f'merge must be None or "lora", got {merge!r}')
    return _Builder(model, state, _namer(names), dtype, merge is not None).build()


def fused(
    parts: Mapping[str, Sequence[str]], names: Names | None = None
) -> Callable[[str], tuple[str, int] | str | None]:
    """``names=`` that makes one tensor of several layers' ones, as inference engines want them.

    In ``fused({"gate_up_proj": ("gate_proj", "up_proj")})`` the tensors of a layer follow each
    other along the first dimension.

    Args:
        names: applied before.
    """
    places = {part: (whole, at) for whole, each in parts.items() for at, part in enumerate(each)}
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
    """Always the same, and no other model's; an :class:`ExportInfo` can hold it and be pickled."""
    return state.kept.setdefault("owner of exports", object())


def is_whole(param: Param) -> bool:
    """Whether gathering the parameter's unit gives the tensor of ``state_dict()``, or a part whose
    others follow along a dimension; else the DTensor itself has to be asked."""
    if not is_rows(param):
        return True
    asks = hasattr(local_part(param.shard), "fsdp_pre_all_gather")
    return not asks and not cuts_of(param.shard)


def is_view(param: Param) -> bool:
    """Whether the gathered parameter is the tensor of ``state_dict()``."""
    return is_whole(param) and (is_rows(param) or param.shard.place.part is None)


def is_rows(param: Param) -> bool:
    return hasattr(param.shard, "_spec")


def place_in_unit(param: Param) -> Place:
    """As :func:`place_of`, of a shard."""
    return cast(Place, place_of(param.shard))


def _namer(names: Names | None) -> Callable[[str], Name]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    return lambda name: names.get(name, name)


def _check_places(state: ShardState) -> None:
    for each in state.extensions:
        raise NotImplementedError(
            f"parameter '{each.fqn}' gathers itself, which exports do not know; use "
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
        self.sources: dict[str, str] = {}  # by name: the first that has it
        self.params = {id(param.object): param for param in state.params()}
        adapters, inner = find_adapters(model) if merges else ({}, set())
        self.saved = saved_modules(model) if merges else {}
        self.adapters = {self.params[key]: found for key, found in adapters.items()}
        self.inner = {self.params[key] for key in inner if key in self.params}

    def build(self) -> ExportInfo:
        units = [self.unit(unit) for unit in self.state.units]
        units.append(UnitExport(-1, tuple(self.buffers())))
        given = tuple(unit for unit in units if unit.entries)
        return ExportInfo(given, owner_of(self.state))

    def buffers(self) -> list[Exported]:
        found = []
        for key, value in buffers_of(self.model, self.keys).items():
            name = self.name(key)
            if name is not None:
                text = name if isinstance(name, str) else name[0]
                self.claim(text, key)
                found.append(Exported(text, value.shape, value.dtype, key, (), (), copies=False))
        return found

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
                "own, or None to leave it out. Parts of one tensor are to be in one unit"
            )

    def unit(self, unit: Unit) -> UnitExport:
        parts: dict[str, dict[int, int]] = {}  # by name: positions by index in the fused tensor
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
                break  # tied names once
        return self.loaded(unit, [self.entry(unit, *each) for each in parts.items()])

    def entry(self, unit: Unit, name: str, parts: dict[int, int]) -> Exported:
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(
                f"names: '{name}' has the parts {sorted(parts)} in unit '{unit.name}'; all parts "
                "of a fused tensor are to be in one unit, numbered from 0"
            )
        positions = tuple(parts[index] for index in range(len(parts)))
        params = [unit.params[position] for position in positions]
        shapes = [param.whole_shape for param in params]
        model_dtype = params[0].types.model
        dtype = self.dtype if self.dtype and model_dtype.is_floating_point else model_dtype
        adapters = self.adapters_of(unit, params[0]) if len(params) == 1 else ()
        if len(params) > 1 and any(param in self.adapters for param in params):
            raise ValueError(f"names: '{name}' is fused and has adapters; export one or the other")
        rows = sum(each[0] for each in shapes) if len(shapes) > 1 else 0
        shape = torch.Size((rows, *shapes[0][1:])) if rows else shapes[0]
        copies = dtype != model_dtype or rows > 0 or bool(adapters) or not is_view(params[0])
        key = self.keys[params[0]][0]
        return Exported(name, shape, dtype, key, positions, adapters, copies)

    def adapters_of(self, unit: Unit, param: Param) -> tuple[Adapter, ...]:
        places = {each: position for position, each in enumerate(unit.params)}
        found = []
        for adapter in self.adapters.get(param, ()):
            pair = self.params[adapter.first], self.params[adapter.second]
            if not all(each in places for each in pair):
                raise ValueError(
                    f"merge=\"lora\": the adapter of '{param.fqn}' is in another unit than the "
                    "weight; let units= keep a block together"
                )
            found.append(replace(adapter, first=places[pair[0]], second=places[pair[1]]))
        return tuple(found)

    def loaded(self, unit: Unit, entries: list[Exported]) -> UnitExport:
        engine = self.state.engine
        if not engine.releases(unit.index):
            return UnitExport(unit.index, tuple(entries))
        layout = engine.layout(unit.index)
        read = set().union(*(each.read for each in entries))
        params = [unit.params[position] for position in read]
        sums = sum(padded_nbytes(param) for param in params)
        # An all-reduce would move exact values where layers compute with encoded ones.
        gathers = any(param.types.gather or not is_whole(param) for param in params)
        if sums * _SUM_FACTOR > layout.nbytes or gathers:
            sums = 0
        received = 0 if sums else layout.received_nbytes
        return UnitExport(unit.index, tuple(entries), sums, sums or layout.nbytes, received)


def padded_nbytes(param: Param) -> int:
    """Bytes of the parameter, as layers compute with it, in an all-reduce of several."""
    nbytes = param.full.numel() * param.types.model.itemsize
    return -(-nbytes // _SUM_ALIGNMENT) * _SUM_ALIGNMENT
