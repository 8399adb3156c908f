"""Measures how much communication a training step hides, for zerocore, FSDP2 and DDP in one run.

python benchmarks/overlap.py                              one process on the emulated link
torchrun --nproc-per-node 2 benchmarks/overlap.py         the real link: NCCL, or gloo on CPU
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track

from bench.lib.links import Link, open_link
from bench.lib.results import RESULTS_FOLDER, write_results
from bench.lib.tables import Table, make_console
from bench.overlap.at_step import AtStepRun
from bench.overlap.lookups import lookups
from bench.overlap.offloaded import HostedRun
from bench.overlap.report import comparison, draw_sweep, find, requirements, sweep
from bench.overlap.run import COMPARED, GOAL_RATIO, HYBRID, OTHER_OPTIONS, WORKLOADS, OverlapRun
from zerocore import Timeline, trace


def measure(link: Link, quick: bool, num_rounds: int | None) -> OverlapRun:
    """Runs all rounds; an interrupt, as a time limit may send it, leaves the whole ones."""
    workload = WORKLOADS["quick" if quick else link.device.type]
    workload = replace(workload, num_rounds=num_rounds or workload.num_rounds)
    hybrid = HYBRID if link.is_emulated else ()
    run = OverlapRun(link, workload, (*COMPARED, *OTHER_OPTIONS, *hybrid))
    rounds = range(workload.num_rounds)
    for index in track(rounds, "rounds", transient=True, disable=not link.is_main):
        try:
            run.measure_round(index)
        except KeyboardInterrupt:
            if index == 0:
                raise
            run.keep_rounds(index)
            break
    return run


def one_step(run: OverlapRun) -> Timeline:
    """A step of stage 3 at the ratio of the goal."""
    subject = find(run, "zerocore stage 3")
    run.set_ratio(GOAL_RATIO)
    with trace(subject.model) as timeline:
        run.step(subject)
    timeline.label = f"{run.link.label}: stage 3, prefetch 1, one step; numbers are blocks"
    return timeline


def write_pictures(run: OverlapRun, timeline: Timeline, stem: Path) -> list[Path]:
    """The sweep, the timeline and the trace beside the result file."""
    written = []
    if run.link.is_emulated:
        written.append(stem.with_name(stem.name + "_sweep.png"))
        draw_sweep(run, written[-1])
    for end in ("_timeline.png", "_trace.json"):
        written.append(stem.with_name(stem.name + end))
        timeline.write(written[-1])
    return written


def report(run: OverlapRun) -> list[Table]:
    """All tables of the run itself."""
    tables = [comparison(run)]
    if run.link.is_emulated:
        tables += [comparison(run, hybrid=True), requirements(run), sweep(run)]
    return tables


def main(
    quick: Annotated[bool, typer.Option(help="Tiny and short: only to see that it runs.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Times that all are measured.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS_FOLDER,
    save: Annotated[bool, typer.Option(help="Write result files and pictures.")] = True,
) -> None:
    """Measures, prints the tables and writes JSON, markdown, pictures and a Chrome trace."""
    load = os.getloadavg()[0]
    link = open_link()
    run = measure(link, quick, rounds)
    timeline = one_step(run)
    tables = [*report(run), lookups(link, quick)]
    raw = {"load_at_start": load, **run.raw()}
    if link.is_emulated:
        at_step = AtStepRun(run)
        at_step.measure(run.workload.num_rounds)
        tables.append(at_step.table())
        raw["at_step"] = at_step.raw()
    hosted = HostedRun(run) if link.is_emulated and link.device.type == "cpu" else None
    if hosted is not None:
        hosted.measure(run.workload.num_rounds)
        tables.append(hosted.table())
        raw["hosted"] = hosted.raw()
    if link.is_main:
        console = make_console()
        for table in tables:
            table.show(console)
        if save:
            markdown = "\n".join(table.markdown() for table in tables)
            theme = f"overlap_{link.label}_{link.device.type}"
            paths = write_results(theme, raw, markdown, folder=out)
            stem = paths[0].with_suffix("")
            paths += write_pictures(run, timeline, stem)
            if hosted is not None:
                paths.append(stem.with_name(stem.name + "_host_timeline.png"))
                hosted.timeline().write(paths[-1])
            console.print(f"written: {', '.join(path.name for path in paths)}")
    if link.device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
