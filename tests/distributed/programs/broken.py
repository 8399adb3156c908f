"""Programs that go wrong in every way under anything but plain: what the suite must notice."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def is_plain(run: Run) -> bool:
    """Whether this is the truth."""
    return type(run) is Run


@program("a number that differs")
def broken_number(run: Run) -> None:
    run.record(1.0 if is_plain(run) else 1.001)


@program("an error for the reader on all ranks")
def broken_refused(run: Run) -> None:
    if not is_plain(run):
        raise ValueError("zerocore does not do this; do that")


@program("an error that nobody wrote, on all ranks")
def broken_error(run: Run) -> None:
    if not is_plain(run):
        raise RuntimeError("mat2 must be a matrix")


@program("an error on one rank while the other one waits for it")
def broken_hang(run: Run) -> None:
    if not is_plain(run) and run.rank == 0:
        raise ValueError("zerocore does not do this; do that")
    dist.barrier()


@program("a collective that one rank leaves out")
def broken_wait(run: Run) -> None:
    if is_plain(run) or run.rank == 0:
        dist.barrier()


@program("an error on one rank, with nobody waiting")
def broken_half(run: Run) -> None:
    if not is_plain(run) and run.rank == 1:
        raise ValueError("zerocore does not do this; do that")


@program("a rank that dies")
def broken_death(run: Run) -> None:
    if not is_plain(run) and run.rank == 1:
        os._exit(3)


@program("a rank that never ends")
def broken_loop(run: Run) -> None:
    while not is_plain(run) and run.rank == 1:
        time.sleep(0.1)


@program("nothing wrong, behind all of these")
def broken_not(run: Run) -> None:
    run.record(run.rank)
