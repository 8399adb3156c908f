"""The time that a first gather at the optimizer's step hides under a pause between steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.lib.links import Traffic
from bench.lib.systems import System, import_zerocore
from bench.lib.tables import Table
from bench.overlap.offloaded import waits_of
from bench.overlap.run import GOAL_RATIO, OverlapRun, Subject, traffic_of

SYSTEMS = (
    System("zerocore", 3, "in the forward"),
    System("zerocore", 3, "at the step", gather_at_step=True),
)
PAUSE_IN_GATHERS = 2  # as long as logging and loading between two steps


@dataclass
class Rounds:
    """Of one system, a figure a round, ms of forward and backward."""

    free: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class AtStepRun:
    """The two systems on the link of an overlap run, with a pause before each forward."""

    def __init__(self, run: OverlapRun) -> None:
        self.run = run
        self.pause_s = PAUSE_IN_GATHERS * run.gather_ms(GOAL_RATIO) / 1e3
        self.subjects = [run.build(system) for system in SYSTEMS]
        self.rounds = {subject.system.label: Rounds() for subject in self.subjects}
        for subject in self.subjects * 3:
            self._step(subject)

    def _step(self, subject: Subject) -> float:
        time.sleep(self.pause_s)
        return self.run.step(subject)

    def _fastest(self, subject: Subject) -> float:
        self._step(subject)
        return min(self._step(subject) for _ in range(self.run.workload.steps_per_round))

    def _events(self, subject: Subject, count: int) -> list[Any]:
        with import_zerocore().record_events(subject.model) as events:
            for _ in range(count):
                self._step(subject)
        return list(events)

    def measure_round(self) -> None:
        """Both systems in turn, on an infinitely fast link and on that of the goal."""
        for subject in self.subjects:
            rounds = self.rounds[subject.system.label]
            self.run.set_ratio(0)
            rounds.free.append(self._fastest(subject))
            self.run.set_ratio(GOAL_RATIO)
            rounds.steps.append(self._fastest(subject))
            # A gather may begin in a step and be waited for in the next one.
            rounds.waits.append(waits_of(self._events(subject, 1), self._events(subject, 3)))

    def table(self) -> Table:
        """Hidden shares: of all, of the most that a gather in the forward allows, at the step."""
        shares = ("hidden %", "of possible %", "at the step %")
        table = Table(
            f"{self.run.link.label}: the first gather of a step, and a pause before the forward",
            ["system", "free", "step", "comm", "exposed", *shares, "waits", *shares],
        )
        total, first, last = self._traffic_ms()
        for label, rounds in self.rounds.items():
            pairs = zip(rounds.steps, rounds.free, strict=True)
            exposed, waits = median(step - free for step, free in pairs), median(rounds.waits)
            cells = [median(rounds.free), median(rounds.steps), total, exposed]
            table.add(
                label,
                *(f"{ms:.1f}" for ms in cells),
                *_shares(exposed, total, first, last),
                f"{waits:.1f}",
                *_shares(waits, total, first, last),
            )
        table.notes = self._notes()
        return table

    def _traffic_ms(self) -> tuple[float, float, float]:
        """All communication of a step, its first gather, its last reduction."""
        run = self.run
        run.set_ratio(GOAL_RATIO)
        kinds = (
            traffic_of(SYSTEMS[0], run.workload.num_blocks),
            Traffic(all_gather=1),
            Traffic(reduce_scatter=1),
        )
        total, first, last = (run.link.step_ms(run.block_nbytes, each) for each in kinds)
        return total, first, last

    def _notes(self) -> list[str]:
        return [
            f"Forward and backward after a pause of {self.pause_s * 1e3:.1f} ms, "
            f"{PAUSE_IN_GATHERS} gathers long, in which nothing computes: logging, loading.",
            "Possible: all but the first gather and the last reduction, as in the tables above. At "
            "the step: all but the last reduction, the bound where the first gather begins with "
            "the optimizer's step. Waits: of three steps less those of one, from the timeline.",
        ]

    def raw(self) -> dict[str, Any]:
        """Everything that was measured."""
        return {
            "pause_ms": self.pause_s * 1e3,
            **{label: vars(rounds) for label, rounds in self.rounds.items()},
        }


def _shares(exposed: float, total: float, first: float, last: float) -> list[str]:
    """Percent hidden: of all, of all but the first gather and the last reduction, of all but it."""
    bounds = (0.0, first + last, last)
    return [f"{100 * (1 - (exposed - bound) / (total - bound)):.1f}" for bound in bounds]
