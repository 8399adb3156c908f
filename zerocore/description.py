"""What ``describe`` prints: units, regions, bytes, padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zerocore.state import ShardState, state_of


@dataclass(frozen=True)
class UnitDescription:
    """One unit; sizes in bytes."""

    name: str
    num_params: int
    param_nbytes: int
    buffer_nbytes: int
    shard_nbytes: int
    regions: tuple[str, ...]

    @property
    def padding_nbytes(self) -> int:
        """Bytes of the buffer that hold no parameter."""
        return self.buffer_nbytes - self.param_nbytes


@dataclass(frozen=True)
class Description:
    """A sharded model; ``str()`` is a table."""

    model: str
    stage: int
    world_size: int
    rank: int
    units: tuple[UnitDescription, ...]

    def __str__(self) -> str:
        width = max(4, *(len(unit.name) for unit in self.units))
        lines = [
            f"{self.model}: stage {self.stage}, rank {self.rank} of {self.world_size}, "
            f"{len(self.units)} units",
            f"{'unit':<{width}}  params  {'bytes':>14}  {'shard bytes':>14}  {'padding':>9}  "
            "regions",
        ]
        for unit in self.units:
            lines.append(
                f"{unit.name:<{width}}  {unit.num_params:>6}  {unit.param_nbytes:>14,}  "
                f"{unit.shard_nbytes:>14,}  {unit.padding_nbytes:>9,}  {', '.join(unit.regions)}"
            )
        total = sum(unit.param_nbytes for unit in self.units)
        shards = sum(unit.shard_nbytes for unit in self.units)
        padding = sum(unit.padding_nbytes for unit in self.units)
        params = sum(unit.num_params for unit in self.units)
        lines.append(f"{'total':<{width}}  {params:>6}  {total:>14,}  {shards:>14,}  {padding:>9,}")
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """The units of a sharded model, their bytes, regions and padding."""
    state = state_of(model)
    units = tuple(_describe_unit(state, index) for index in range(len(state.units)))
    return Description(
        type(model).__name__, state.config.stage, state.world_size, state.rank, units
    )


def _describe_unit(state: ShardState, index: int) -> UnitDescription:
    unit, layout = state.units[index], state.engine.layout(index)
    regions = []
    for region in layout.regions:
        dtype = unit.params[region.params[0]].full.dtype
        kind = "trainable" if region.requires_grad else "frozen"
        regions.append(f"{str(dtype).removeprefix('torch.')} {kind}")
    return UnitDescription(
        unit.name,
        len(unit.params),
        layout.param_nbytes,
        layout.nbytes,
        layout.shard_nbytes,
        tuple(regions),
    )
