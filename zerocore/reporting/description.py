"""Describes a sharded model: units, regions, bytes, padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from zerocore._C import Layout
from zerocore.common.tables import render_table
from zerocore.matrices.exchange import Choice
from zerocore.model.state import ShardState, state_of
from zerocore.options.config import ShardConfig
from zerocore.options.offload import FIRST_STAGE
from zerocore.options.precision import ParamTypes
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner


@dataclass(frozen=True)
class UnitDescription:
    """A unit's sizes in bytes, dtypes and ranks.

    Attributes:
        ranks: the ranks that share it, replicas by shards if there are both.
        divisor: divides the sum of the ranks' gradients; None in a plan.
    """

    name: str
    num_params: int
    param_nbytes: int
    buffer_nbytes: int
    shard_nbytes: int
    regions: tuple[str, ...]
    ranks: str = ""
    divisor: float | None = None

    @property
    def padding_nbytes(self) -> int:
        """Bytes of the unit's buffer without a parameter."""
        return self.buffer_nbytes - self.param_nbytes


@dataclass(frozen=True)
class Description:
    """The description of a sharded model; ``str()`` is a table."""

    model: str
    stage: int
    world_size: int
    rank: int
    units: tuple[UnitDescription, ...]
    offload: str = ""  # offloaded state, and where it is
    num_near: int = 1
    replicas_share: str | None = None
    registered: str = ""  # see registered_of

    def title(self) -> str:
        """Returns one line with the model, its stage and its ranks."""
        return (
            f"{self.model}: stage {self.stage}, rank {self.rank} of {self.world_size}, "
            f"{len(self.units)} units{self.offload and f', {self.offload}'}"
            + (f", later gathers from {self.num_near} near ranks" if self.num_near > 1 else "")
            + (", replicas share the optimizer's states" if self.replicas_share else "")
            + (self.registered and f", {self.registered}")
        )

    def rows(self) -> list[list[str]]:
        """Returns the table as text, with a row for each unit and one for their sum."""
        rows = [["unit", "params", "bytes", "shard bytes", "padding", "regions"]]
        for unit in self.units:
            rows.append([unit.name, *_cells([unit]), ", ".join(unit.regions)])
        rows.append(["total", *_cells(self.units), ""])
        if len({(unit.ranks, unit.divisor) for unit in self.units}) > 1:
            rows[0] += ["ranks", "divisor"]
            for row, unit in zip(rows[1:], self.units, strict=False):
                row += [unit.ranks, f"{unit.divisor:g}"]
            rows[-1] += ["", ""]
        return rows

    def __str__(self) -> str:
        return render_table(self.title(), self.rows())


def _cells(units: Sequence[UnitDescription]) -> list[str]:
    sums = (
        sum(unit.num_params for unit in units),
        sum(unit.param_nbytes for unit in units),
        sum(unit.shard_nbytes for unit in units),
        sum(unit.padding_nbytes for unit in units),
    )
    return [f"{number:,}" for number in sums]


@overload
def describe(model: nn.Module) -> Description: ...


@overload
def describe(model: Optimizer) -> Choice: ...


def describe(model: nn.Module | Optimizer) -> Description | Choice:
    """Describes the units of a sharded model: their bytes, regions and padding.

    For a :class:`zerocore.matrices.Muon` or an optimizer of :func:`zerocore.matrices.owned` it
    returns ``model.describe()``: each parameter's optimizer and owner, and the bytes of a step.

    Raises:
        ValueError: the model is not sharded, or the optimizer has no ``describe()``.
        RuntimeError: this process was forked from the one that sharded it.
    """
    if isinstance(model, Optimizer):
        if (method := getattr(model, "describe", None)) is None:
            raise ValueError(
                f"{type(model).__name__} updates each shard where it is; describe() takes a "
                "sharded model, a zerocore.matrices.Muon or an optimizer of zerocore.matrices.owned"
            )
        choice: Choice = method()
        return choice
    state = state_of(model)
    units = tuple(
        _describe_unit(
            unit.name,
            state.engine.layout(unit.index),
            [param.types for param in unit.params],
            _names({entry.dtype for entry in unit.encoded if entry.dtype is not None}),
            ranks=state.ranks_of(unit.index).text,
            divisor=1.0 / state.engine.settings(unit.index).gradient_scale,
        )
        for unit in state.units
    )
    return Description(
        type(model).__name__,
        state.config.stage,
        state.world_size,
        state.rank,
        units,
        _describe_offload(state.config),
        state.meshes[0].num_near,
        state.config.communication.replicas_share,
        registered_of(state),
    )


def _describe_offload(config: ShardConfig) -> str:
    places = {"cpu": "on the host", "disk": "on disk"}
    parts = {
        where: [part for part in FIRST_STAGE if config.place_of(part) == place]
        for place, where in places.items()
    }
    return ", ".join(f"{' and '.join(names)} {where}" for where, names in parts.items() if names)


def describe_plan(model: str, planner: Planner, division: Division) -> Description:
    """Describes a model as :func:`describe`, before it is sharded."""
    layouts = planner.layouts(division)
    rows = zip(planner.units, layouts, strict=True)
    units = tuple(_describe_unit(unit.name, layout, unit.types) for unit, layout in rows)
    return Description(model, division.stage, division.world_size, division.rank, units)


def _describe_unit(
    name: str,
    layout: Layout,
    types: Sequence[ParamTypes],
    encoded: Sequence[str] = (),  # dtypes of tensors that are gathered instead of parameters
    ranks: str = "",
    divisor: float | None = None,
) -> UnitDescription:
    regions = []
    for region in layout.regions:
        if region.params[0] >= len(types):  # encoded bytes, or a parameter of several tensors
            if not region.is_gathered:
                regions.append(f"frozen, gathered as {' and '.join(encoded)}")
            continue
        kind = "trainable" if region.requires_grad else "frozen"
        first = types[region.params[0]]
        narrow = _names([first.gather]) if region.is_encoded else []
        wire = narrow if region.is_gathered else encoded
        wires = f", gathered as {' and '.join(wire)}" if wire else ""
        regions.append(f"{_describe_types(first)} {kind}{wires}")
    sizes = (layout.param_nbytes, layout.nbytes, layout.shard_nbytes)
    return UnitDescription(name, len(types), *sizes, tuple(regions), ranks, divisor)


def _names(dtypes: Iterable[torch.dtype | None]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def wires_of(state: ShardState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the dtypes in which parameters are gathered, and the dtypes of reduced gradients."""
    gathered, reduced = set(), set()
    for unit in state.units:
        gathered |= {entry.dtype for entry in unit.encoded if entry.dtype}
        for region in state.engine.layout(unit.index).regions:
            if region.params[0] >= len(unit.params):
                continue
            types = unit.params[region.params[0]].types
            if region.is_gathered:
                gathered.add(types.gather if region.is_encoded and types.gather else types.model)
            if region.requires_grad:
                reduced.add(types.reduce)
    return tuple(_names(gathered)), tuple(_names(reduced))


def registered_of(state: ShardState) -> str:
    """Returns the memory that is registered with a communicator; empty without ``registered``."""
    if not state.config.communication.registered:
        return ""
    memory = state.engine.registered
    if memory is None:
        return "registered memory: none with one rank"
    if not memory.is_offered:
        return f"registered memory: not offered by {memory.backend}"
    scope = "" if state.meshes[0].reductions is None else " for gathers alone"
    windows = f"{memory.num_windows} window{'s' * (memory.num_windows != 1)}"
    return f"registered memory{scope}: {windows}, {memory.nbytes / 2**20:,.1f} MiB"


def _describe_types(types: ParamTypes) -> str:
    names = [
        str(dtype).removeprefix("torch.")
        for dtype in (types.model, types.main, types.reduce, types.grad)
    ]
    if len(set(names)) == 1:
        return names[0]
    model, main, reduce, grad = names
    return f"{model} (main weights {main}, gradients reduced in {reduce}, kept in {grad})"
