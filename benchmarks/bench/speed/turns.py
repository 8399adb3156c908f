"""Runs two builds in new processes, which take turns."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.speed.commits import SpeedError, last_lines

BENCHMARKS = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
ANSWER_LIMIT_S = 120.0
# 0 is this build, 1 the other one. In this order a steady drift affects both alike.
TURNS = (0, 1, 1, 0, 1, 0, 0, 1)


@dataclass(frozen=True)
class Row:
    """A row of the table: a case of the worker, its group, and the steps in a turn.

    The same processes time all rows of one `process`, one after the other.
    """

    name: str
    case: str
    backend: str
    process: str
    steps: int
    with_peak: bool = False


@dataclass
class Found:
    """Figures of both builds (this one, the other one), with one figure a run."""

    wall: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    cpu: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    peak: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add(self, which: int, turns: Sequence[tuple[float, float]], peak: float) -> None:
        """Adds a run of one build: wall and processor time of each turn."""
        walls, cpus = zip(*turns, strict=True)
        self.wall[which].append(median(walls))
        self.cpu[which].append(median(cpus))
        self.peak[which].append(peak)


class Ranks:
    """The ranks of one build, each a new process; errors call the build `name`."""

    def __init__(self, root: Path, name: str, backend: str) -> None:
        self._root, self._name = root.resolve(), name
        self._folder = tempfile.TemporaryDirectory(dir=_memory_folder())
        num_ranks = NUM_RANKS if backend == "gloo" else 1
        self._processes = [self._start(backend, rank, num_ranks) for rank in range(num_ranks)]

    def _start(self, backend: str, rank: int, num_ranks: int) -> subprocess.Popen[str]:
        rendezvous = str(Path(self._folder.name) / "store")
        command = [sys.executable, "-m", "bench.speed.worker", backend, str(rank)]
        # Processes import their build's package, and the scripts of this checkout.
        path = f"{self._root}{os.pathsep}{BENCHMARKS}"
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [*command, str(num_ranks), rendezvous],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                cwd=self._folder.name,
            )

    def tell(self, command: str) -> None:
        """Sends a line to all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                print(command, file=process.stdin, flush=True)
            except BrokenPipeError:
                self._fail()

    def answers(self) -> list[Any]:
        """Returns the next line of each rank."""
        deadline = time.monotonic() + ANSWER_LIMIT_S
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            limit = max(deadline - time.monotonic(), 0.0)
            ready = select.select([process.stdout], [], [], limit)[0]
            line = process.stdout.readline() if ready else ""
            if not line:
                self._fail()
            lines.append(json.loads(line))
        return lines

    def confirm(self) -> None:
        """Reads the answers to `start`: all ranks have imported this build."""
        for answer in self.answers():
            if Path(answer["file"]).resolve().parents[1] != self._root:
                raise SpeedError(f"{self._name} was not imported, but {answer['file']}")

    def turn(self, num_steps: int) -> tuple[float, float]:
        """Returns the us of the fastest step: the mean over ranks, and all ranks' CPU time."""
        self.tell(f"turn {num_steps}")
        answers = self.answers()
        walls = zip(*(answer["wall"] for answer in answers), strict=True)
        cpus = zip(*(answer["cpu"] for answer in answers), strict=True)
        return min(map(fmean, walls)), min(map(sum, cpus))

    def stop(self) -> float:
        """Drops the case; returns a rank's peak in MiB above its resident memory before."""
        self.tell("stop")
        return max(answer["peak"] for answer in self.answers())

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log_{rank}"

    def _fail(self) -> None:
        time.sleep(0.5)  # lets the rank that failed first write its error
        logs = [last_lines(path.read_text(errors="replace")) for path in self._logs()]
        raise SpeedError(
            f"the benchmarks of this checkout do not run with {self._name}:\n" + "\n".join(logs)
        )

    def _logs(self) -> Iterable[Path]:
        return map(self._log, range(len(self._processes)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            with suppress(BrokenPipeError):  # the process may have left a line unread
                process.__exit__(None, None, None)
        self._folder.cleanup()


def run(rows: Sequence[Row], builds: dict[str, Path], found: dict[str, Found], first: int) -> None:
    """Runs rows that share processes once; adds a figure of each build to each row.

    `builds` are this build and the other one by name, `first` says which begins.
    """
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Ranks(root, name, rows[0].backend)) for name, root in builds.items()
        ]
        for row in rows:
            for each in ranks:  # both builds warm up at the same time
                each.tell(f"start {row.case}")
            for each in ranks:
                each.confirm()
            turns: tuple[list[tuple[float, float]], ...] = ([], [])
            for turn in TURNS:
                which = turn ^ first
                turns[which].append(ranks[which].turn(row.steps))
            for which, each in enumerate(ranks):
                found[row.name].add(which, turns[which], each.stop())


def measure(
    rows: Sequence[Row],
    builds: dict[str, Path],
    num_runs: int,
    deadline: float,
    is_noisy: Callable[[Row, Found], bool],
) -> dict[str, Found]:
    """Makes `num_runs` runs of all rows, then more of noisy rows until `deadline`.

    `deadline` is a reading of the monotonic clock.
    """
    found = {row.name: Found() for row in rows}
    for index in range(num_runs):
        for process in dict.fromkeys(row.process for row in rows):
            run([row for row in rows if row.process == process], builds, found, index % 2)
    longest: dict[str, float] = {}
    for index in range(num_runs, 3 * num_runs):
        noisy = [row for row in rows if is_noisy(row, found[row.name])]
        for process in dict.fromkeys(row.process for row in noisy):
            if time.monotonic() + longest.get(process, 30.0) < deadline:
                began = time.monotonic()
                run([row for row in noisy if row.process == process], builds, found, index % 2)
                longest[process] = time.monotonic() - began
    return found


def _memory_folder() -> str | None:
    """Returns a folder in memory, so that saves and loads do not measure the disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
