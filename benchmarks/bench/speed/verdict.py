"""Computes ratios of two builds' figures, their intervals and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

# A ratio's interval must be narrower than a change of this size; else it is called noise.
HIDDEN = 0.02
# A ratio closer to 1 than this is no change: a build compared with itself stays closer.
SAME = 0.015
# The interval misses the ratio's true median in at most this share of cases.
MISSED = 0.075


@dataclass(frozen=True)
class Ratio:
    """The median over runs of this build's figure / the other one's, and its interval."""

    middle: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`slower`, `faster`, `same`, or `noise`: the interval may hide a change."""
        if self.low > 1 + SAME or self.high < 1 - SAME:
            return "slower" if self.low > 1 else "faster"
        if (self.high - self.low) / 2 > HIDDEN:
            return "noise"
        if self.low > 1 and self.middle > 1 + SAME:
            return "slower"
        return "faster" if self.high < 1 and self.middle < 1 - SAME else "same"

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio_of(figures: tuple[Sequence[float], Sequence[float]]) -> Ratio:
    """Returns the ratio of both builds' figures, one a run."""
    ratios = sorted(own / other for own, other in zip(*figures, strict=True))
    rank = _interval_rank(len(ratios))
    return Ratio(median(ratios), ratios[rank - 1], ratios[-rank])


def _interval_rank(num_runs: int) -> int:
    """Returns the place, counted from each end, of the figure that bounds the median's interval.

    The true median is outside if fewer than `rank` runs lie on one side of it.
    """
    rank = 1
    while 2 * sum(comb(num_runs, few) for few in range(rank + 1)) / 2**num_runs <= MISSED:
        rank += 1
    return rank


def verdict_of(wall: Ratio, cpu: Ratio) -> str:
    """Returns the verdict by wall time; if that is noise, also by processor time."""
    if wall.verdict == "noise" and cpu.verdict != "noise":
        return f"noise; by CPU {cpu.verdict}"
    return wall.verdict
