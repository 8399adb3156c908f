"""zerocore.run_elastic: ranks are killed, stopped or come, and the processes that live go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

import zerocore
from tests.by_night import by_day, by_night
from tests.distributed.harness import find_free_port, run_ranks, run_to_end
from tests.recovery import lives

FAST = {"last_call_timeout": 5, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@pytest.fixture
def port() -> Iterator[int]:
    """A store that outlives all ranks."""
    found = find_free_port()
    store = TCPStore("localhost", found, is_master=True, wait_for_workers=False)
    yield found
    del store


def live(port: int, folder: Path, ranks: tuple[int, int], fault: tuple[str, int], come: int) -> Any:
    """A process, by whose number its node is named; returns its lives and the last one's losses.

    Args:
        fault: the point, and who is lost there; -1 for nobody.
        come: the first of the processes that come when one is lost, or behind the first save.
    """
    number, (point, victim) = int(os.environ["RANK"]), fault
    found: list[Any] = []
    while number >= come and not (folder / "come").exists():
        time.sleep(0.05)

    def lose(*_: Any) -> None:
        (folder / "come").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def train(life: zerocore.recovery.Life) -> list[float]:
        found.append(dist.get_world_size())
        at = {0: "forward" if point == "load" else point}
        doomed = {0: victim, 1: (victim + 2) % 4}
        if point == "load":
            at[1] = "load"
        mine = at.get(life.number, "") if doomed.get(life.number) == number else ""
        begin, losses = lives.train(
            folder / f"node{number}", mine, lose, ranks[0] < ranks[1],
            (lambda: None) if victim >= 0 else lambda: admit(life, folder),
        )  # fmt: skip
        found.append(begin)
        return losses

    if point == "meeting" and number == victim:
        dist.init_process_group = lose
    losses = zerocore.run_elastic(
        train, f"localhost:{port}", ranks, timeout=timedelta(seconds=8), is_host="false", **FAST
    )
    return found, losses


def admit(life: zerocore.recovery.Life, folder: Path) -> None:
    (folder / "come").touch()
    time.sleep(0.5)
    life.admit()


SHRUNK = [
    (point, victim) for point in lives.POINTS for victim in range(4 if point == "load" else 3)
]
FEW = [("backward", 1)]


@pytest.mark.parametrize(("point", "victim"), by_day(SHRUNK, FEW))
def test_those_that_live_go_on(port: int, point: str, victim: int, tmp_path: Path) -> None:
    """In their processes, with the losses of an undisturbed run."""
    whole = run_ranks(lives.undisturbed, 3, tmp_path, True)[0]
    most = 4 if point == "load" else 3  # of which two are lost that are no neighbours
    ends = run_to_end(
        live, most, port, tmp_path, (1, most), (point, victim), most, launch="torchrun", grace=60
    )
    left = [end.value for end in ends if end.error is None]
    assert len(left) == 2, ends
    for (*past, begin), losses in left:
        assert past[0] == most and past[-1] == 2  # one that is late to a meeting is left out
        assert begin in (2, 4)
        assert losses == pytest.approx(whole[begin:], rel=1e-4)


@pytest.mark.nightly
def test_a_rank_is_lost_behind_the_first_meeting(port: int, tmp_path: Path) -> None:
    """The others wait for it in the group's making, and meet again."""
    whole = run_ranks(lives.undisturbed, 3, tmp_path, True)[0]
    ends = run_to_end(
        live, 3, port, tmp_path, (1, 3), ("meeting", 1), 3, launch="torchrun", grace=60
    )
    left = [end.value for end in ends if end.error is None]
    assert len(left) == 2, ends
    for past, losses in left:
        assert past == [2, 0] and losses == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(("point", "victim"), [("step", 2), *by_night(("reduce", 0), ("copy", 1))])
def test_another_process_takes_its_place(
    port: int, point: str, victim: int, tmp_path: Path
) -> None:
    """On as many ranks as before, bit for bit."""
    whole = run_ranks(lives.undisturbed, 3, tmp_path, False)
    ends = run_to_end(
        live, 4, port, tmp_path, (3, 3), (point, victim), 3, launch="torchrun", grace=60
    )
    assert [end.rank for end in ends if end.error] == [victim], ends
    begin = ends[3].value[0][-1]
    losses = sorted(end.value[1] for end in ends if not end.error)
    assert begin in (2, 4) and losses == sorted(each[begin:] for each in whole)


@pytest.mark.nightly  # it is a matter of seconds when they come
def test_processes_that_come_are_admitted(port: int, tmp_path: Path) -> None:
    whole = run_ranks(lives.undisturbed, 3, tmp_path, True)[0]
    ends = run_to_end(live, 4, port, tmp_path, (2, 4), ("", -1), 2, launch="torchrun", grace=60)
    for number, end in enumerate(ends):
        assert end.error is None, end.error
        (*past, begin), losses = end.value
        assert past == ([2, 4] if number < 2 else [4])
        assert begin in (2, 4, 6) and losses == pytest.approx(whole[begin:], rel=1e-4)


def test_bounds() -> None:
    with pytest.raises(ValueError, match=r"ranks: expected \(fewest, most\).*, got \(3, 2\)"):
        zerocore.run_elastic(print, "localhost:1", (3, 2))


def raise_alone(port: int) -> Any:
    def train(life: zerocore.recovery.Life) -> None:
        dist.barrier()
        if int(os.environ["RANK"]) == 1:
            raise KeyError("a token that is not in the vocabulary")
        zerocore.shard(nn.Linear(2, 2))

    return zerocore.run_elastic(
        train, f"localhost:{port}", (2, 2), timeout=timedelta(seconds=4), is_host="false",
        join_timeout=6, **FAST,
    )  # fmt: skip


def disagree(port: int, how: str) -> Any:
    lives: list[int] = []

    def train(life: zerocore.recovery.Life) -> None:
        lives.append(life.number)
        if how == "sizes":
            dist.all_reduce(torch.zeros(2 + dist.get_rank()))
        dist.barrier()
        raise dist.DistBackendError("all ranks disagree, each time")

    with pytest.raises(RuntimeError):
        zerocore.run_elastic(
            train, f"localhost:{port}", (2, 2), max_restarts=1, timeout=timedelta(seconds=8),
            is_host="false", **FAST,
        )  # fmt: skip
    return lives


@pytest.mark.parametrize("how", ["sizes", "error"])
def test_a_mistake_of_the_program_ends_it(port: int, how: str) -> None:
    """It fails in each life, and ``max_restarts=1`` allows two."""
    ends = run_to_end(disagree, 2, port, how, launch="torchrun", grace=60)
    assert [end.error for end in ends] == [None, None], ends
    assert max(len(end.value) for end in ends) <= 2


@pytest.mark.nightly
def test_too_few_are_left(port: int) -> None:
    """One rank raises an error of its own, and ends; the other one waits for another in vain."""
    errors = [
        end.error or "" for end in run_to_end(raise_alone, 2, port, launch="torchrun", grace=60)
    ]
    assert "KeyError: 'a token" in errors[1]
    assert "RendezvousTimeoutError" in errors[0], errors[0]
