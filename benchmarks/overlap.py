"""Measures how much communication a training step hides, for zerocore, FSDP2 and DDP in one run.

python benchmarks/overlap.py                              one process on the emulated link
torchrun --local-addr 127.0.0.1 --nproc-per-node 2 benchmarks/overlap.py    NCCL, or gloo on CPU
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track

from bench.lib.links import Link, open_link
from bench.lib.results import RESULTS_FOLDER, Results
from bench.lib.tables import Table
from bench.overlap.lookups import lookups
from bench.overlap.report import comparison, draw_sweep, find, requirements, sweep
from bench.overlap.run import COMPARED, GOAL_RATIO, HYBRID, OTHER_OPTIONS, WORKLOADS, OverlapRun
from zerocore import trace
from zerocore.reporting import Timeline


def make_run(link: Link, quick: bool, num_rounds: int | None, ratios: str) -> OverlapRun:
    """Prepares the measurement of all systems."""
    workload = WORKLOADS["quick" if quick else link.device.type]
    workload = replace(workload, num_rounds=num_rounds or workload.num_rounds)
    if ratios:
        # The comparison needs the goal's.
        wanted = {GOAL_RATIO, *map(float, ratios.split(","))}
        workload = replace(workload, ratios=tuple(sorted(wanted)))
    hybrid = HYBRID if link.is_emulated else ()
    return OverlapRun(link, workload, (*COMPARED, *OTHER_OPTIONS, *hybrid))


def measure(run: OverlapRun, quick: bool, results: Results) -> None:
    """Measures the rounds of the run."""
    link, num_rounds = run.link, run.workload.num_rounds
    for index in track(range(num_rounds), "rounds", transient=True, disable=not link.is_main):
        run.measure_round(index)
        results.write(report(run), run.raw())
    results.write([*report(run), lookups(link, quick)], run.raw())


def one_step(run: OverlapRun) -> Timeline:
    """Records a step of stage 3 at the goal's ratio."""
    subject = find(run, "zerocore stage 3")
    run.set_ratio(GOAL_RATIO)
    with trace(subject.model) as timeline:
        run.step(subject)
    timeline.label = f"{run.link.label}: stage 3, prefetch 1, one step; numbers are blocks"
    return timeline


def write_pictures(run: OverlapRun, results: Results) -> None:
    """Writes the sweep, the timelines and the trace."""
    timeline = one_step(run)
    if not run.link.is_main:
        return
    if run.link.is_emulated:
        draw_sweep(run, results.file("_sweep.png"))
    for end in ("_timeline.png", "_trace.json"):
        timeline.write(results.file(end))


def report(run: OverlapRun) -> list[Table]:
    """Returns all tables of the run itself."""
    tables = [comparison(run)]
    if run.link.is_emulated:
        tables += [comparison(run, hybrid=True), requirements(run), sweep(run)]
    return tables


def main(
    quick: Annotated[bool, typer.Option(help="A tiny, short run to see that it works.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds over all systems.")] = None,
    ratios: Annotated[str, typer.Option(help="Communication over compute, such as 0.5,1.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS_FOLDER,
    save: Annotated[bool, typer.Option(help="Write result files and pictures.")] = True,
) -> None:
    """Measures, prints the tables and writes JSON, markdown, pictures and a Chrome trace."""
    link = open_link()
    theme = f"overlap_{link.label}_{link.device.type}"
    with Results(theme, save, out, is_main=link.is_main) as results:
        run = make_run(link, quick, rounds, ratios)
        measure(run, quick, results)
        if save:
            write_pictures(run, results)
    if link.device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
