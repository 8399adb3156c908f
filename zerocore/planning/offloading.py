"""Which offload makes a model fit the device and the host, and when its update is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerocore.common.links import RANKS_PER_NODE
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.common.quantities import format_nbytes
from zerocore.model.offload import Offload
from zerocore.model.stages import STAGES, placements_of
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner

UPDATE_NBYTES = 28
"""Host memory traffic for a parameter: AdamW in float32 reads four numbers and writes three."""
STEP_OPERATIONS = 6
"""For a parameter and a token: two in the forward, four in the backward."""
FOLDER = "..."
"""In the place of a path that is not known."""


@dataclass(frozen=True)
class Host:
    """The memory beside the devices of a machine.

    Attributes:
        memory_nbytes: bytes, for all ranks on the machine.
        bandwidth_bytes_per_s: what an update reads and writes in a second.
        num_ranks: ranks on the machine, at most.
    """

    memory_nbytes: int
    bandwidth_bytes_per_s: float
    num_ranks: int = RANKS_PER_NODE

    def nbytes_of(self, world_size: int) -> int:
        """The share of one of so many ranks."""
        return self.memory_nbytes // min(world_size, self.num_ranks)

    def hiding_tokens(self, world_size: int, flops_per_s: float) -> int:
        """Tokens that a machine computes with in a step that lasts as long as the host's update.

        Both are proportional to the parameters, which cancel.
        """
        flops = flops_per_s * min(world_size, self.num_ranks)
        return round(UPDATE_NBYTES * flops / (STEP_OPERATIONS * self.bandwidth_bytes_per_s))


@dataclass(frozen=True)
class OffloadPlan:
    """One stage with one offload, on one rank; predicted.

    Attributes:
        stage: 0 to 3.
        offload: what leaves the device.
        memory: bytes without activations.
        device_nbytes: most bytes on the device, with activations where these were measured.
        fits: whether the device's and the host's memory suffice.
    """

    stage: int
    offload: Offload
    memory: MemoryBytes
    device_nbytes: int
    fits: bool


def offloads_at(stage: int, place: str) -> Iterator[Offload]:
    """The parts that can leave the device at a stage for ``"cpu"`` or ``"disk"``, least first;
    gradients go to the host."""
    path = FOLDER if place == "disk" else None
    yield Offload(states=place, path=path)
    if placements_of(stage).gradients:
        yield Offload(states=place, gradients="cpu", path=path)
    if placements_of(stage).parameters:
        yield Offload(states=place, gradients="cpu", parameters=place, path=path)


def plan_offloads(
    planner: Planner, division: Division, host: Host, memory: int, activations: int
) -> tuple[OffloadPlan, ...]:
    """All stages with all offloads, the least first: those to a disk behind those to the host. The
    stage of ``division`` does not matter; ``memory`` of a device and the peak of ``activations``
    are bytes."""
    share, plans = host.nbytes_of(division.world_size), []
    for place in ("cpu", "disk"):
        for stage in STAGES:
            for offload in offloads_at(stage, place):
                found = planner.memory(replace(division, stage=stage, offload=offload))
                on_device = found.reserved + activations
                fits = on_device <= memory and found.host <= share
                plans.append(OffloadPlan(stage, offload, found, on_device, fits))
    return tuple(plans)


def advise_offload(
    plans: tuple[OffloadPlan, ...], host: Host, world_size: int, flops_per_s: float
) -> str:
    """A sentence: the least offload that fits, and from how many tokens on it is hidden."""
    fit = next((plan for plan in plans if plan.fits), None)
    share = host.nbytes_of(world_size)
    if fit is None:
        least = min(plans, key=lambda plan: plan.device_nbytes)
        return (
            f"no offload fits: stage {least.stage} with {call_of(least.offload)} takes "
            f"{format_nbytes(least.device_nbytes)} of the device and "
            f"{format_nbytes(least.memory.host)} of the {format_nbytes(share)} that a rank has on "
            "the host"
        )
    fits = (
        f"stage {fit.stage} with {call_of(fit.offload)} is the least offload that fits: "
        f"{format_nbytes(fit.device_nbytes)} of the device, {format_nbytes(fit.memory.host)} of "
        f"the {format_nbytes(share)} that a rank has on the host"
    )
    if fit.memory.disk > 0:
        file = format_nbytes(fit.memory.disk)
        return f"{fits}, and a file of {file} for each rank, which every step reads and writes"
    tokens = host.hiding_tokens(world_size, flops_per_s)
    return (
        f"{fits}; the update there is as long as the compute of {tokens:,} tokens a step on the "
        "machine (predicted)"
    )


def call_of(offload: Offload) -> str:
    """The argument of ``shard`` as text, without what is the default."""
    default = Offload()
    parts = [
        f"{name}={getattr(offload, name)!r}"
        for name in ("states", "gradients", "parameters", "path")
        if getattr(offload, name) != getattr(default, name) or name == "states"
    ]
    return f"offload=zerocore.Offload({', '.join(parts)})"
