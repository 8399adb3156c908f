"""Reports a memory run: tables that reconcile plan, allocator and outside view, and pictures."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.lib.tables import Table
from bench.memory.cell import PHASES, Cell, MemoryRun

CATEGORIES = {
    "parameters": "tab:blue",
    "gradients": "tab:green",
    "optimizer state": "tab:purple",
    "bucket pool": "tab:orange",
    "pool, unused": "navajowhite",
    "saved activations": "tab:gray",
    "temporaries": "lightgray",
}
NAMES = {"cpu": ("malloc", "RSS"), "cuda": ("torch's allocator", "NVML")}


def categories(run: MemoryRun) -> dict[str, int]:
    """Returns the bytes at the steady steps' peak by category; their sum is the allocator's."""
    parts = run.measured
    known = {
        "parameters": parts.parameters,
        "gradients": parts.gradients,
        "optimizer state": parts.optimizer,
        "bucket pool": parts.pool,
        "pool, unused": parts.pool_reserved - parts.pool,
        "saved activations": run.saved_activations,
    }
    known["temporaries"] = run.phases["steady steps"].allocated_peak - sum(known.values())
    return known


def label_of(cell: Cell) -> str:
    """Returns the origin of the figures, which every table and picture shows."""
    return (
        f"rank 0 of {cell.world_size} EMULATED ranks on {cell.device.upper()}, GPT {cell.size}, "
        f"{cell.dtype}, batch {cell.batch}; memory of this rank is real and measured"
    )


def reconciliation(cell: Cell, runs: list[MemoryRun]) -> Table:
    """Reconciles the plan, the allocator and the outside view, in MB (1e6 bytes)."""
    allocator, outside = NAMES[cell.device]
    table = Table(
        f"Where the bytes are at the peak of a steady step, MB: {label_of(cell)}",
        ["", *(run.label for run in runs)],
    )
    found = [categories(run) for run in runs]
    for name in ("parameters", "gradients", "optimizer state", "bucket pool"):
        table.add(name, *(_mb(each[name]) for each in found))
    table.add("= measured state and pool", *(_mb(run.measured.total) for run in runs))
    table.add(
        "  planned (predicted)", *(_mb(run.planned.total if run.planned else None) for run in runs)
    )
    table.add("  measured - planned, bytes", *(_difference(run) for run in runs))
    for name in ("pool, unused", "saved activations", "temporaries"):
        table.add(name, *(_mb(each[name]) for each in found))
    peaks = [run.phases["steady steps"] for run in runs]
    table.add(f"= {allocator}, peak", *(_mb(peak.allocated_peak) for peak in peaks))
    table.add(
        f"free in {allocator}", *(_mb(peak.reserved_peak - peak.allocated_peak) for peak in peaks)
    )
    table.add("the rest", *(_mb(peak.outside_peak - peak.reserved_peak) for peak in peaks))
    table.add("before the model", *(_mb(run.baseline) for run in runs))
    table.add(
        f"= {outside}, peak",
        *(_mb(run.baseline + run.phases["steady steps"].outside_peak) for run in runs),
    )
    table.notes = _notes(cell, runs)
    return table


def _difference(run: MemoryRun) -> str:
    return "-" if run.planned is None else f"{run.measured.total - run.planned.total:,}"


def _notes(cell: Cell, runs: list[MemoryRun]) -> list[str]:
    allocator, outside = NAMES[cell.device]
    notes = [
        f"{runs[0].num_params:,} parameters, AdamW. Each system has a process of its own.",
        "Saved activations: storages that autograd saved in a forward, each once. Temporaries: "
        f"{allocator}'s peak less everything above it: gradients of activations, workspaces of "
        "operators, and the unsharded parameters and gradients of FSDP2, which has no pool.",
        "Pool, unused: bytes of its arena beyond the most that is in use at a time.",
    ]
    if cell.device == "cpu":
        notes.append(
            "Peaks are the highest of samples a millisecond apart. Before the model: Python, "
            "libraries and their kernels. The rest: pages of libraries touched later, stacks of "
            "threads; negative if memory that malloc holds was never touched."
        )
    else:
        notes.append(
            f"The allocator's peaks are its own, {outside}'s the highest of samples a millisecond "
            f"apart. Before the model: all that {outside} counted on the device then, mainly "
            "CUDA's context. The rest, outside of torch's allocators: NCCL's buffers, "
            "workspaces of libraries, modules loaded later."
        )
    planned = runs[0].planned_activations
    if planned is not None:
        notes.append(f"Peak of activations by zerocore.plan (predicted): {planned / 1e6:,.1f} MB.")
    return notes


def phases(cell: Cell, runs: list[MemoryRun]) -> Table:
    """Shows the outside view by phase, above the bytes before the model."""
    allocator, outside = NAMES[cell.device]
    table = Table(
        f"{outside} by phase, end / peak, MB above the bytes before the model",
        ["phase", *(run.label for run in runs)],
    )
    for name in PHASES:
        found = [run.phases[name] for run in runs]
        table.add(name, *(f"{_mb(p.outside)} / {_mb(p.outside_peak)}" for p in found))
    table.notes = [f"{allocator}'s figures of each phase are in the raw numbers."]
    return table


def model_state(cell: Cell, runs: list[MemoryRun]) -> Table:
    """Compares parameters, gradients and optimizer state with the formula."""
    table = Table(
        "Model state (parameters, gradients, optimizer), MB", ["", *(run.label for run in runs)]
    )
    table.add("measured", *(_mb(run.measured.model_state) for run in runs))
    table.add("formula", *(_mb(formula(cell, run)) for run in runs))
    table.notes = [
        "Formula: P parameters of b bytes on N ranks need bP(1 + 1 + 2) at stage 0. Stages divide "
        "their parts by N: the optimizer's 2 from stage 1 on, gradients from 2, parameters "
        "at 3 (Rajbhandari et al. 2020, arXiv:1910.02054). Measured is above it by padding."
    ]
    return table


def formula(cell: Cell, run: MemoryRun) -> int:
    """Returns the bytes of model state by the formula."""
    shares = [2, 1, 1]  # in the order in which stages shard them
    itemsize = 4 if cell.dtype == "float32" else 2
    numel = sum(
        share / cell.world_size if index < run.stage else share
        for index, share in enumerate(shares)
    )
    return round(numel * itemsize * run.num_params)


def draw_bars(cell: Cell, runs: list[MemoryRun], path: Path) -> None:
    """Draws each system's categories, stacked, and the outside view as a line."""
    outside = NAMES[cell.device][1]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    labels = [run.label for run in runs]
    bottom = [0.0] * len(runs)
    for name, color in CATEGORIES.items():
        heights = [max(0, categories(run)[name]) / 1e6 for run in runs]
        axes.bar(labels, heights, bottom=bottom, color=color, label=name, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    peaks = [run.phases["steady steps"].outside_peak / 1e6 for run in runs]
    axes.plot(labels, peaks, "k_--", markersize=24, label=f"{outside} above the start, peak")
    axes.set_ylabel("MB")
    axes.set_title(label_of(cell), fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_step(cell: Cell, runs: list[MemoryRun], path: Path) -> None:
    """Draws the memory during one steady step, in a panel for each system."""
    allocator, outside = NAMES[cell.device]
    figure = Figure(figsize=(11, 2 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), 1, sharey=True), runs, strict=True):
        start = run.marks["forward"]
        times = [(sample.time_ns - start) / 1e6 for sample in run.step]
        held = [sample.allocated / 1e6 for sample in run.step]
        axes.fill_between(times, held, color="tab:blue", alpha=0.3, label=allocator)
        axes.plot(times, [s.outside / 1e6 for s in run.step], color="black", lw=1, label=outside)
        for name, time_ns in run.marks.items():
            axes.axvline((time_ns - start) / 1e6, color="tab:red", lw=0.6)
            if name in ("forward", "backward"):
                axes.text((time_ns - start) / 1e6, 0, f" {name}", fontsize=7, color="tab:red")
        axes.set_ylabel(f"{run.label}\nMB", fontsize=8)
    axes.set_xlabel("ms of one steady step; the optimizer's update is between the last two lines")
    figure.get_axes()[0].legend(fontsize=7, loc="upper left")
    figure.suptitle(f"{label_of(cell)}; above the start", fontsize=9)
    figure.savefig(path, dpi=110)


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.1f}"
