"""The harness tells what became of every rank."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RanksFailed, run_ranks


def add_up(number: int) -> tuple[int, float]:
    total = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_values_come_in_rank_order(world_size: int) -> None:
    total = sum(10.0 + rank for rank in range(world_size))
    assert run_ranks(add_up, world_size, 10) == [(rank, total) for rank in range(world_size)]


def raise_on_rank1() -> None:
    print("said before")
    if dist.get_rank() == 1:
        raise KeyError("lost")


def test_an_exception_names_its_rank_and_place() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2.*raise_on_rank1.*lost.*said before"):
        run_ranks(raise_on_rank1, 2)


def hang_on_rank0() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 of 2.*did not end.*hang_on_rank0"):
        run_ranks(hang_on_rank0, 2, timeout=2.0)


def die_on_rank1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_shows_how() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 ---\ndied, exit code -9"):
        run_ranks(die_on_rank1, 2)
