"""The harness tells what became of every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import RanksFailed, run_ranks
from zerocore.checkpoint.commit import files


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


def draw() -> tuple[int, float, int]:
    """The process, a random number and what the process group is called."""
    print("said before")
    group = dist.group.WORLD
    assert group is not None
    return os.getpid(), torch.rand(()).item(), int(group.group_name)


def test_ranks_are_used_again_and_find_what_fresh_ones_find(world_size: int) -> None:
    first, second = run_ranks(draw, world_size), run_ranks(draw, world_size)
    assert first == second
    fresh = run_ranks(draw, world_size, fresh=True)
    assert [found[1:] for found in fresh] == [found[1:] for found in first]
    assert not {process for process, *_ in fresh} & {process for process, *_ in first}


def raise_without_a_word() -> None:
    raise KeyError("lost")


def test_output_is_that_of_one_call() -> None:
    run_ranks(draw, 1)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_without_a_word, 1)
    assert "said before" not in str(caught.value)


def set_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def set_type() -> None:
    torch.set_default_dtype(torch.float64)


def replace_function() -> None:
    files.write = print  # type: ignore[assignment]


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def filter_warnings() -> None:
    warnings.simplefilter("ignore")


def make_mesh() -> None:
    init_device_mesh("cpu", (2, 1))


LEAVES_BEHIND = (set_variable, set_type, replace_function, start_thread, filter_warnings, make_mesh)


@pytest.mark.parametrize("function", LEAVES_BEHIND)
def test_a_process_in_which_something_is_left_behind_ends(function: Callable[[], None]) -> None:
    before = {process for process, *_ in run_ranks(draw, 2)}
    run_ranks(function, 2)
    assert not before & {process for process, *_ in run_ranks(draw, 2)}
