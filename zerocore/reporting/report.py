"""Reports a sharded model's meters, which are always on, for each step and on average."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from zerocore._C import allocator_counts
from zerocore.common.events import GATHERS
from zerocore.common.nodes import GPUS
from zerocore.common.quantities import format_number
from zerocore.common.tables import render_table
from zerocore.hooks.optimizer_steps import optimizers_of
from zerocore.model.meters import Step
from zerocore.model.state import ShardState, state_of
from zerocore.reporting.description import registered_of, wires_of
from zerocore.reporting.events import read_events
from zerocore.reporting.memory_usage import usage_of
from zerocore.reporting.recording import queues_of, source_of, title_of
from zerocore.reporting.step_figures import (
    CommunicationTimes,
    MemoryFigures,
    StepFigures,
    times_by_unit,
    total,
    unit_means,
)

PEAK_FLOPS = {"H100 PCIe": 756e12} | {gpu.name: gpu.peak_flops for gpu in GPUS.values()}
"""Dense bf16 operations a second, by a part of the device's name; from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Report:
    """Meters of a sharded model on this rank; ``str()`` is two tables.

    Attributes:
        title: model, stage, rank, device.
        source: ``measured``, or ``emulated`` if the other ranks do not exist.
        steps: the latest steps, oldest first.
        units: the mean times of each unit over traced steps, by name.
        memory: bytes and counts so far.
        meshes: ranks and divisor of each unit's gradients, if units differ.
        wires: dtypes in which parameters are gathered, and dtypes of reduced gradients.
        registered: memory that is registered with a communicator; empty without ``registered``.
    """

    title: str
    source: str
    steps: tuple[StepFigures, ...]
    units: dict[str, CommunicationTimes]
    memory: MemoryFigures
    meshes: tuple[str, ...] = ()
    wires: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    registered: str = ""

    @property
    def counted(self) -> tuple[StepFigures, ...]:
        """The steps that averages count: all but step 0, which allocates and learns the order."""
        return tuple(step for step in self.steps if step.number > 0)

    def mean(self, name: str) -> float | None:
        """Returns the mean of an attribute of :class:`StepFigures` over the counted steps, or of
        :class:`CommunicationTimes` over the traced ones; steps in which it is None do not count.
        """
        values = [value for step in self.counted if (value := _figure(step, name)) is not None]
        return fmean(values) if values else None

    def mean_communication(self, name: str) -> float | None:
        """Returns the same as :meth:`mean`."""
        return self.mean(name)

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as values for JSON."""
        return asdict(self)

    def write_jsonl(self, path: str | Path) -> None:
        """Writes a line of JSON for each step."""
        lines = [json.dumps({"source": self.source, **asdict(step)}) for step in self.steps]
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def __str__(self) -> str:
        last = self.steps[-1] if self.steps else None
        rows = [["", "mean", "last step"]]
        for label, name, digits, scale in _ROWS:
            show = format_number(digits, scale)
            value = None if last is None else _figure(last, name)
            rows.append([label, show(self.mean(name)), show(value)])
        title = f"{self.title}: {self.source}, mean of {len(self.counted)} steps"
        tables = [render_table(title, rows, _notes(self))]
        if self.units:
            tables.append(render_table("exposed time by unit, ms a step", _unit_rows(self.units)))
        return "\n".join(tables)


def report(
    model: nn.Module,
    *,
    tokens: int | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> Report:
    """Reports a sharded model's latest steps on this rank, from its meters.

    A step ends at the first forward after an optimizer's update. Step 1 and every 16th after it
    are traced; other steps are only counted.

    Args:
        model: a sharded model that has trained some steps.
        tokens: tokens that this rank processes in a step.
        flops_per_token: operations for a token in forward and backward; 6 per parameter by
            default (Kaplan et al. 2020, arXiv:2001.08361), which leaves out attention scores. There
            is no default, and so no MFU, if only some ranks share a part of the model, such as
            experts: the number that a token uses is unknown.
        peak_flops: operations a second of the device; by default :data:`PEAK_FLOPS`.

    Raises:
        ValueError: the model is not sharded, or a number is not positive and finite.
        TypeError: a rate is not a number.
    """
    rates = (tokens, flops_per_token, peak_flops)
    state = state_of(model)
    return _report_of(model, state, state.meters.steps(), rates)


def recent_report(model: nn.Module, *rates: float | None) -> Report:
    """Reports as :func:`report`, but only the last traced step and later ones. Does not wait for
    updates on the host. ``rates``: tokens, operations for a token, operations a second.

    Raises:
        ValueError, TypeError: as :func:`report`.
    """
    state = state_of(model)
    steps = state.meters.steps(waits=False)
    traced = [i for i, step in enumerate(steps) if step.records is not None]
    return _report_of(model, state, steps[traced[-1] if traced else -1 :], rates)


def _report_of(
    model: nn.Module, state: ShardState, steps: list[Step], rates: tuple[float | None, ...]
) -> Report:
    tokens, flops_per_token, peak_flops = rates
    for name, value in zip(("tokens", "flops_per_token", "peak_flops"), rates, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if flops_per_token is None and all(unit.mesh == 0 for unit in state.units):
        flops_per_token = 6.0 * sum(param.spec.numel for param in state.params())
    if peak_flops is None and state.device.type == "cuda":
        device = torch.cuda.get_device_name(state.device)
        peak_flops = next((flops for part, flops in PEAK_FLOPS.items() if part in device), None)
    names, queues = [unit.name for unit in state.units], queues_of(state)
    traces = {
        step.number: times_by_unit(read_events(step.records, names), queues)
        for step in steps
        if step.records is not None
    }

    def mfu_of(rate: float | None) -> float | None:
        if rate is None or flops_per_token is None or peak_flops is None:
            return None
        return rate * flops_per_token / peak_flops

    figures = []
    for step in steps:
        rate = None if tokens is None else tokens * 1e9 / step.step_ns
        figures.append(_figures(step, traces.get(step.number), rate, mfu_of(rate)))
    units = unit_means(list(traces.values()))
    title, memory = title_of(model, state), _memory(state)
    meshes, wires = _meshes(state), wires_of(state)
    return Report(
        title, source_of(state), tuple(figures), units, memory, meshes, wires, registered_of(state)
    )


def _meshes(state: ShardState) -> tuple[str, ...]:
    names: dict[tuple[str, float], list[str]] = {}
    for unit in state.units:
        divisor = 1.0 / state.engine.settings(unit.index).gradient_scale
        names.setdefault((state.ranks_of(unit.index).text, divisor), []).append(f"'{unit.name}'")
    if len(names) == 1:
        return ()
    return tuple(
        f"gradients over {ranks} ranks, divided by {divisor:g}: {', '.join(of_mesh)}"
        for (ranks, divisor), of_mesh in names.items()
    )


def _figures(
    step: Step, trace: dict[str, CommunicationTimes] | None, rate: float | None, mfu: float | None
) -> StepFigures:
    gathered = sum(step.counts[op].nbytes for op in GATHERS)
    return StepFigures(
        number=step.number,
        step_ms=step.step_ns / 1e6,
        outside_ms=step.outside_ns / 1e6,
        tokens_per_s=rate,
        mfu=mfu,
        gathered_nbytes=gathered,
        near_nbytes=step.counts["gather_near"].nbytes,
        reduced_nbytes=sum(count.nbytes for count in step.counts.values()) - gathered,
        num_collectives=sum(count.num for count in step.counts.values()),
        exchanged_nbytes=step.exchanged.nbytes,
        pool_nbytes=step.pool_nbytes,
        num_pool_allocations=step.num_pool_allocations,
        num_retries=step.num_retries,
        num_device_allocations=step.num_device_allocations,
        communication=None if trace is None else total(list(trace.values())),
        units=trace,
    )


def _memory(state: ShardState) -> MemoryFigures:
    is_counted = allocator_counts(str(state.device)) is not None
    counts = torch.cuda.memory_stats(state.device) if is_counted else {}
    default = 0 if is_counted else None
    usage = usage_of(state, optimizers_of(state))
    return MemoryFigures(
        pool_peak=state.engine.pool_stats.peak_nbytes,
        pool_reserved=state.engine.pool_stats.reserved_nbytes,
        allocated_peak=counts.get("allocated_bytes.all.peak", default),
        reserved_peak=counts.get("reserved_bytes.all.peak", default),
        num_retries=counts.get("num_alloc_retries", default),
        num_device_allocations=counts.get("num_device_alloc", default),
        resident_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        host=usage.host,
        disk=usage.disk,
    )


def _figure(step: StepFigures, name: str) -> float | None:
    return getattr(step if hasattr(step, name) else step.communication, name, None)


# Label, attribute of a step or of its communication, digits, scale.
_ROWS: tuple[tuple[str, str, int, float], ...] = (
    ("step, ms", "step_ms", 1, 1),
    ("  after the update, ms", "outside_ms", 1, 1),
    ("  idle, ms", "idle_ms", 1, 1),
    ("tokens/s of this rank", "tokens_per_s", 0, 1),
    ("MFU, %", "mfu", 1, 100),
    ("collectives", "num_collectives", 0, 1),
    ("gathered, MiB", "gathered_nbytes", 1, 2**-20),
    ("  from near ranks, MiB", "near_nbytes", 1, 2**-20),
    ("reduced, MiB", "reduced_nbytes", 1, 2**-20),
    ("sent by the optimizer, MiB", "exchanged_nbytes", 1, 2**-20),
    ("bucket pool, peak MiB", "pool_nbytes", 1, 2**-20),
    ("  allocations", "num_pool_allocations", 1, 1),
    ("allocator retries", "num_retries", 2, 1),
    ("  device allocations", "num_device_allocations", 1, 1),
    ("all-gather, ms", "all_gather_ms", 1, 1),
    ("reduce, ms", "reduce_ms", 1, 1),
    ("optimizer's exchange, ms", "exchange_ms", 1, 1),
    ("exposed, ms", "exposed_ms", 1, 1),
    ("overlap, %", "overlap", 1, 100),
)


def _notes(result: Report) -> list[str]:
    memory = result.memory
    parts = {
        "bucket pool": memory.pool_peak,
        "allocated": memory.allocated_peak,
        "reserved": memory.reserved_peak,
        "resident": memory.resident_peak,
    }
    peaks = ", ".join(
        f"{name} {nbytes / 2**20:,.1f} MiB" for name, nbytes in parts.items() if nbytes is not None
    )
    gathered, reduced = (" and ".join(dtypes) or "nothing" for dtypes in result.wires)
    on_wire = f"on the wire: parameters in {gathered}, gradients in {reduced}"
    lines = [*result.meshes, on_wire, f"peaks so far: {peaks}"]
    if result.registered:
        lines.append(result.registered)
    if memory.num_retries is not None:
        lines.append(
            f"allocator so far: {memory.num_retries} retries, "
            f"{memory.num_device_allocations} device allocations"
        )
    if memory.host > 0:
        lines.append(f"on the host, by offload: {memory.host / 2**20:,.1f} MiB")
    if memory.disk > 0:
        lines.append(f"on disk, by offload: {memory.disk / 2**20:,.1f} MiB")
    traced = sum(step.communication is not None for step in result.counted)
    lines.append(f"times of communication: mean of {traced} traced steps")
    if not result.steps:
        lines.append("no step was completed: an update of a torch.optim optimizer ends one")
    return lines


def _unit_rows(units: dict[str, CommunicationTimes]) -> list[list[str]]:
    show, percent = format_number(2), format_number(1, 100)
    rows = [["unit", "all-gather", "reduce", "exchange", "exposed", "overlap %"]]
    for name, unit in units.items():
        times = (unit.all_gather_ms, unit.reduce_ms, unit.exchange_ms, unit.exposed_ms)
        rows.append([name, *map(show, times), percent(unit.overlap)])
    return rows
