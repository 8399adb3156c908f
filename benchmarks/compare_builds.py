"""Times another build of zerocore beside this one, in turn, in one run.

Usage: python benchmarks/compare_builds.py ../other-checkout

Both builds stay loaded, each in processes of its own, and take turns of a few milliseconds, so a
machine that is slower for a minute is slower for both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import typer
from rich.progress import track

from bench.lib.results import Results
from bench.lib.tables import Table

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "host, whole step, 9 parameters a block": ["host_step", "9"],
    "host, whole step, 32 parameters a block": ["host_step", "32"],
    "host, 9 parameters a block": ["host", "9"],
    "host, 32 parameters a block": ["host", "32"],
    "zero_grad, 9 parameters a block": ["zero_grad", "9"],
    "AdamW, 9 parameters a block": ["adamw", "9"],
    "step on 2 ranks, stage 0": ["ranks", "0"],
    "step on 2 ranks, stage 2": ["ranks", "2"],
    "step on 2 ranks, stage 3": ["ranks", "3"],
    "first step on 2 ranks, stage 0": ["first", "0"],
    "first step on 2 ranks, stage 3": ["first", "3"],
}
NUM_RANKS = 2
STEPS_PER_TURN = 3
NOTES = (
    "A turn is the fastest of three steps, on ranks that of the slower rank; the ratio is the "
    "median over the turns of this build's time by that of the other build's turn beside it, in "
    "brackets its quartiles. The last column compares the fastest turns of all.",
    "host: forward and backward of 32 blocks at stage 3 on collectives that return at once, then "
    "zero_grad and zerocore.optim.AdamW by themselves, whole step: all of these; step: forward, "
    "backward, AdamW of torch on a small GPT, over gloo; first step: that of a model that was "
    "sharded right before.",
)


class Build:
    """A checkout's zerocore in the processes that run one case; closes them when left."""

    def __init__(self, root: Path, case: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        jobs = [case]
        if case[0] in ("ranks", "first"):
            file = str(Path(self._folder.name) / "rendezvous")
            jobs = [[*case, str(rank), str(NUM_RANKS), file] for rank in range(NUM_RANKS)]
        here = str(Path(__file__).parent)
        environment = {**os.environ, "PYTHONPATH": f"{root}:{here}", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.step.build_worker", *job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=here,
            )
            for job in jobs
        ]
        for line in self._answers():
            if Path(line).resolve().parents[1] != root.resolve():
                raise RuntimeError(f"expected the zerocore of {root}, got {line}")

    def turn(self) -> float:
        """Microseconds of a step."""
        for process in self._processes:
            assert process.stdin is not None
            print(STEPS_PER_TURN, file=process.stdin, flush=True)
        return max(float(line) for line in self._answers())

    def _answers(self) -> list[str]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline().strip())
        if not all(lines):
            raise RuntimeError("a process of the benchmark ended, see its error above")
        return lines

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def take_turns(other: Path, case: list[str], num_turns: int) -> tuple[list[float], list[float]]:
    """Times of `num_turns` turns of this build and of the other one."""
    times: tuple[list[float], list[float]] = ([], [])
    with Build(ROOT, case) as this, Build(other, case) as that:
        builds = (this, that)
        for index in track(range(num_turns), description=" ".join(case), transient=True):
            for which in (0, 1) if index % 2 else (1, 0):
                times[which].append(builds[which].turn())
    return times


def main(
    other: Annotated[Path, typer.Argument(help="A checkout whose extension is built.")],
    turns: Annotated[int, typer.Option(help="Turns of each build in each case.")] = 200,
    only: Annotated[str, typer.Option(help="Cases whose names contain this.")] = "",
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = False,
) -> None:
    """Prints the ratio of this build's times to those of OTHER."""
    table = Table("This build beside another", ["case", "this us", "other us", "ratio", "fastest"])
    table.notes = list(NOTES)
    raw = {}
    with Results("compare_builds", save) as results:
        for name, case in CASES.items():
            if only in name:
                own, others = raw[name] = take_turns(other, case, turns)
                ratios = [a / b for a, b in zip(own, others, strict=True)]
                low, middle, high = quantiles(ratios, n=4)
                cells = [f"{median(own):.0f}", f"{median(others):.0f}"]
                spread = f"{middle:.3f} ({low:.3f} - {high:.3f})"
                table.add(name, *cells, spread, f"{min(own) / min(others):.3f}")
                results.write([table], {"us": raw})


if __name__ == "__main__":
    typer.run(main)
