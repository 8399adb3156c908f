"""Measures the memory of a rank by stage, and reconciles plan, allocator and NVML (or RSS).

python benchmarks/memory.py                    on a GPU with its real memory, otherwise on the CPU
python benchmarks/memory.py --size 7b          needs a GPU with 120 GB for stage 0

One process plays rank 0 of N on the emulated link: it allocates as much as a rank of N does.
NVML counts the whole device, so nothing else may use the GPU at the same time.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from bench.lib.results import RESULTS_FOLDER, Results
from bench.lib.tables import make_console
from bench.memory.cell import SIZES, SYSTEMS, Cell, MemoryRun, measure_in_fresh_process
from bench.memory.nvml import NvmlDevice
from bench.memory.report import draw_bars, draw_step, model_state, phases, reconciliation
from zerocore.reporting.nvml import NvmlUnavailable, driver_version

DTYPES = ("float32", "bfloat16")
NUM_RAW_SAMPLES = 100


def choose_device(wanted: str) -> tuple[str, str]:
    """Returns the device, and why it is not the GPU. Exits if a requested GPU is missing."""
    if wanted == "cpu":
        return "cpu", "asked for"
    try:
        with NvmlDevice():
            return "cuda", f"driver {driver_version()}"
    except NvmlUnavailable as error:
        if wanted == "cuda":
            raise typer.BadParameter(str(error), param_hint="--device") from None
        return "cpu", str(error)


def measure(cells: list[Cell], results: Results) -> list[MemoryRun]:
    """Measures every system, one after the other."""
    cell, runs = cells[0], []
    setting = {key: value for key, value in asdict(cell).items() if key != "system"}
    if cell.device == "cuda":
        setting["gpu"] = torch.cuda.get_device_name()
    for each in track(cells, "systems", transient=True):
        runs.append(measure_in_fresh_process(each))
        tables = [reconciliation(cell, runs), phases(cell, runs), model_state(cell, runs)]
        results.write(tables, {"link": "emulated", **setting, "runs": [_raw(run) for run in runs]})
    return runs


def _raw(run: MemoryRun) -> dict[str, Any]:
    """Returns all figures for the JSON file, with some of a step's samples and the highest."""
    kept = run.step[:: len(run.step) // NUM_RAW_SAMPLES + 1]
    highest = max(run.step, key=lambda sample: sample.outside)
    step = [asdict(sample) for sample in sorted({*kept, highest}, key=lambda s: s.time_ns)]
    return {**asdict(run), "step": step}


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "29m",
    world_size: Annotated[int, typer.Option(help="Emulated ranks.")] = 8,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 2,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    fsdp2: Annotated[bool, typer.Option(help="Measure FSDP2, too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS_FOLDER,
    save: Annotated[bool, typer.Option(help="Write result files and pictures.")] = True,
) -> None:
    """Measures, prints the tables and writes JSON, markdown and pictures."""
    if size not in SIZES or dtype not in DTYPES or device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"unknown size {size}, dtype {dtype} or device {device}")
    chosen, reason = choose_device(device)
    make_console().print(f"measuring on the {chosen.upper()}: {reason}", highlight=False)
    systems = SYSTEMS if fsdp2 else SYSTEMS[:-1]
    cells = [Cell(system, size, world_size, batch, dtype, chosen) for system in systems]
    with Results(f"memory_{size}_emulated_{chosen}", save, out) as results:
        runs = measure(cells, results)
        if save:
            draw_bars(cells[0], runs, results.file("_bars.png"))
            draw_step(cells[0], runs, results.file("_step.png"))


if __name__ == "__main__":
    typer.run(main)
