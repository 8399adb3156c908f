"""Measures the memory of a rank by stage, and reconciles plan, allocator and NVML (or RSS).

python benchmarks/memory.py                    on a GPU with its real memory, otherwise on the CPU
python benchmarks/memory.py --size 7b          needs a GPU with 120 GB for stage 0

One process plays rank 0 of N on the emulated link: what it allocates is what a rank of N
allocates. NVML counts the whole device, so nothing else may run on the GPU meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from bench.lib.results import RESULTS_FOLDER, write_results
from bench.lib.tables import make_console
from bench.memory.cell import SIZES, SYSTEMS, Cell, MemoryRun, run_in_fresh_process
from bench.memory.nvml import NvmlDevice
from bench.memory.report import draw_bars, draw_step, model_state, phases, reconciliation
from zerocore.common.nvml import NvmlUnavailable, driver_version

DTYPES = ("float32", "bfloat16")
NUM_RAW_SAMPLES = 100


def choose_device(wanted: str) -> tuple[str, str]:
    """The device to measure on, and why not the GPU, if so. Exits if a GPU was asked for."""
    if wanted == "cpu":
        return "cpu", "asked for"
    try:
        with NvmlDevice():
            return "cuda", f"driver {driver_version()}"
    except NvmlUnavailable as error:
        if wanted == "cuda":
            raise typer.BadParameter(str(error), param_hint="--device") from None
        return "cpu", str(error)


def measure(cell_of: Any, num_systems: int) -> list[MemoryRun]:
    """Every system, one after the other."""
    runs = []
    for system in track(SYSTEMS[:num_systems], "systems", transient=True):
        runs.append(run_in_fresh_process(cell_of(system)))
    return runs


def _raw(run: MemoryRun) -> dict[str, Any]:
    """All figures; of the samples of a step some, their highest among them."""
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
    fsdp2: Annotated[bool, typer.Option(help="FSDP2 beside it.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS_FOLDER,
    save: Annotated[bool, typer.Option(help="Write result files and pictures.")] = True,
) -> None:
    """Measures, prints the tables and writes JSON, markdown and pictures."""
    if size not in SIZES or dtype not in DTYPES or device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"size {size}, dtype {dtype} or device {device} is not known")
    console = make_console()
    chosen, reason = choose_device(device)
    console.print(f"measuring on the {chosen.upper()}: {reason}", highlight=False)

    def cell_of(system: Any) -> Cell:
        return Cell(system, size, world_size, batch, dtype, chosen)

    runs = measure(cell_of, len(SYSTEMS) if fsdp2 else len(SYSTEMS) - 1)
    cell = cell_of(SYSTEMS[0])
    tables = [reconciliation(cell, runs), phases(cell, runs), model_state(cell, runs)]
    for table in tables:
        table.show(console)
    if not save:
        return
    setting = {key: value for key, value in asdict(cell).items() if key != "system"}
    raw = {"link": "emulated", **setting, "runs": [_raw(run) for run in runs]}
    if chosen == "cuda":
        raw["gpu"] = torch.cuda.get_device_name()
    markdown = "\n".join(table.markdown() for table in tables)
    paths = write_results(f"memory_{size}_emulated_{chosen}", raw, markdown, folder=out)
    stem = paths[0].with_suffix("")
    for end, draw in (("_bars.png", draw_bars), ("_step.png", draw_step)):
        paths.append(stem.with_name(stem.name + end))
        draw(cell, runs, paths[-1])
    console.print(f"written: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    typer.run(main)
