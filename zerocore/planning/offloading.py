"""Which offload makes a model fit the device and the host, and when its update is hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from zerocore.common.memory_bytes import MemoryBytes
from zerocore.common.quantities import format_nbytes
from zerocore.options.config import Communication
from zerocore.options.offload import Offload
from zerocore.options.stages import STAGES, placements_of
from zerocore.planning.planner import Planner
from zerocore.planning.setting import Host, Setting

FOLDER = "..."
"""In the place of a path that is not known."""


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


def plan_offloads(planner: Planner, setting: Setting, activations: int) -> tuple[OffloadPlan, ...]:
    """All stages with all offloads, the least first: those to a disk behind those to the host; none
    where no host was given. The peak of ``activations`` is in bytes."""
    machine = setting.machine
    if machine.host is None:
        return ()
    share, plans = machine.host.nbytes_of(setting.world_size), []
    for place in ("cpu", "disk"):
        for stage in STAGES:
            for offload in offloads_at(stage, place):
                found = planner.memory(replace(setting.division(stage), offload=offload))
                on_device = found.reserved + activations
                fits = on_device <= machine.memory_nbytes and found.host <= share
                plans.append(OffloadPlan(stage, offload, found, on_device, fits))
    return tuple(plans)


def advise_offload(plans: Sequence[OffloadPlan], host: Host, setting: Setting) -> str:
    """A sentence: the least offload that fits, and from how many tokens on it is hidden."""
    fit = next((plan for plan in plans if plan.fits), None)
    share = host.nbytes_of(setting.world_size)
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
    tokens = host.hiding_tokens(setting.world_size, setting.machine.flops_per_s)
    return (
        f"{fits}; the update there is as long as the compute of {tokens:,} tokens a step on the "
        "machine (predicted)"
    )


def call_of(options: Offload | Communication, always: str = "states") -> str:
    """The argument of ``shard`` as text: the options that are not the default, and ``always``."""
    kind = type(options)
    default, parts = kind(), []
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        by_all = name == "regather" and value == 1  # a number of ranks in a plan
        if (value != getattr(default, name) and not by_all) or name == always:
            parts.append(f"{name}={value!r}")
    return f"{kind.__name__.lower()}=zerocore.{kind.__name__}({', '.join(parts)})"
