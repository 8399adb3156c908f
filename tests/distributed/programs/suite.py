"""Runs programs under systems in jobs of fresh processes, and judges what came out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.distributed.harness import Outcome, find_free_port, run_to_end
from tests.distributed.programs.player import Job, Played, play, read_played
from tests.distributed.programs.systems import SYSTEMS

WORLD_SIZE = 2
JOB_SECONDS = 300.0
COLLECTIVE_SECONDS = 6.0  # what takes longer is a hang

Ranks = list[Played | None]  # None: the rank did not come to an end


@dataclass(frozen=True)
class Verdict:
    """How a system did: exact, refused, error, WRONG, hang or crash, and the reason in one line.

    An error is an exception on all ranks that was not written for the user to read.
    """

    kind: str
    detail: str = ""
    trace: str = ""


Table = dict[str, dict[str, Verdict]]  # [program][system]


def measure(
    names: Sequence[str], systems: Sequence[str], seconds: float = COLLECTIVE_SECONDS
) -> Table:
    """Plays every program under every system; `plain` is always played, as the truth."""
    table: Table = {name: {} for name in names}
    truth: dict[str, Ranks] = {}
    for system in dict.fromkeys(("plain", *systems)):
        played = dict(play_together(system, names, seconds))
        truth = truth or played
        verdicts = {name: judge(played[name], truth[name], None) for name in names}
        # A number may be wrong because of what a program that raised has left behind.
        wrong = [name for name in names if verdicts[name].kind == "WRONG"]
        for name, ranks in play_together(system, wrong, seconds):
            verdicts[name] = judge(ranks, truth[name], None)
        for name in names:
            if verdicts[name].kind in ("hang", "crash"):
                ranks, died = play_alone(system, name, seconds)
                verdicts[name] = judge(ranks, truth[name], died)
            if system in systems:
                table[name][system] = verdicts[name]
    return table


def play_together(system: str, names: Sequence[str], seconds: float) -> Iterator[tuple[str, Ranks]]:
    """One job for all, and another one behind each program that ended a job."""
    left = list(names)
    while left:
        played = run_job(system, left, seconds)[0]
        done = max(1, *(len(rank) for rank in played))  # 1: all ranks died in the first one
        for index, name in enumerate(left[:done]):
            yield name, [rank[index] if index < len(rank) else None for rank in played]
        left = left[done:]


def play_alone(system: str, name: str, seconds: float) -> tuple[Ranks, str | None]:
    """The ranks' results, and how one died, if one did."""
    played, outcomes = run_job(system, [name], seconds)
    deaths = [o.error for o in outcomes if o.error and o.error.startswith("died")]
    deaths = [death for death in deaths if "Timeout (" not in death]  # the watchdog ended a hang
    ranks = [next(iter(rank), None) for rank in played]
    return ranks, deaths[0] if deaths else None


def run_job(
    system: str, names: Sequence[str], seconds: float
) -> tuple[list[list[Played]], list[Outcome]]:
    """Each rank's results, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="programs-") as directory:
        job = Job(system, tuple(names), directory, find_free_port(), seconds)
        outcomes = run_to_end(play, WORLD_SIZE, job, timeout=JOB_SECONDS, group_timeout=seconds)
        return [list(read_played(job, rank)) for rank in range(WORLD_SIZE)], outcomes


def judge(ranks: Ranks, truth: Ranks, died: str | None) -> Verdict:
    """Compares what the ranks did under a system with what they did under plain."""
    if died is not None:
        return Verdict("crash", died.splitlines()[0], died)
    errors = [None if rank is None else rank.error for rank in ranks]
    found = [error for error in errors if error is not None]
    trace = "\n".join(error.trace for error in found)
    if None in ranks or any(error.no_partner for error in found):
        cause = [error.text for error in found if not error.no_partner] or ["all ranks wait"]
        return Verdict("hang", cause[0], trace)
    if len(found) == len(ranks):
        kind = "refused" if all(error.deliberate for error in found) else "error"
        return Verdict(kind, found[0].text, trace)
    if found:
        return Verdict("crash", f"on some ranks only: {found[0].text}", trace)
    return compare(ranks, truth)


def compare(ranks: Ranks, truth: Ranks) -> Verdict:
    """exact, or WRONG with the first number that differs."""
    for rank, (mine, right) in enumerate(zip(ranks, truth, strict=True)):
        if mine is None or right is None or right.error:
            return Verdict("error", "plain did not end")
        found = difference(mine.records, right.records, "record")
        found = found or difference(mine.states, right.states, "state")
        if found:
            return Verdict("WRONG", f"rank {rank}, {found}")
    return Verdict("exact")


def difference(actual: Any, expected: Any, where: str) -> str | None:
    """The first place where two nests of numbers, tensors and words differ by more than 1e-5."""
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or sorted(actual) != sorted(expected):
            return f"{where}: other names"
        pairs = [(f"{where} {key}", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple) or len(actual) != len(expected):
            return f"{where}: {len(expected)} values expected, got {actual}"
        numbered = enumerate(zip(actual, expected, strict=True))
        pairs = [(f"{where}[{index}]", a, e) for index, (a, e) in numbered]
    elif isinstance(expected, float | Tensor):
        return number_difference(actual, expected, where)
    else:
        return None if actual == expected else f"{where}: expected {expected}, got {actual}"
    return next(filter(None, (difference(a, e, name) for name, a, e in pairs)), None)


def number_difference(actual: Any, expected: Any, where: str) -> str | None:
    """As difference, for tensors and floats."""
    if not isinstance(actual, float | Tensor):
        return f"{where}: expected {expected}, got {actual}"
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6, equal_nan=True)
    except AssertionError as error:
        return f"{where}: {' '.join(str(error).split())}"
    return None


def check_systems(systems: Sequence[str]) -> None:
    """Raises ValueError if one is unknown."""
    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown:
        raise ValueError(f"unknown systems {unknown}; there are {sorted(SYSTEMS)}")
