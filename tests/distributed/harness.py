"""Runs a function on real gloo ranks, each one a fresh process.

The processes are forked from a server that has imported torch, the models and zerocore once, so a
call on four ranks costs about 0.2 s and nothing is left over from the test before it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.zoo import PRELOAD

Launch = Literal["group", "torchrun", "none"]

REPOSITORY = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # what the other ranks get to end after one has failed
GROUP_TIMEOUT_SECONDS = 30.0


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds every rank's traceback, stack and output."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with an error (traceback, death or hang)."""

    rank: int
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """Shared by every rank of one call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    launch: Launch
    directory: str
    port: int
    group_timeout: float


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    launch: Launch = "group",
) -> list[Any]:
    """Calls `function(*args)` on every rank and returns the values in rank order.

    `function` is a module-level function. `launch` says what a rank finds: a default process
    "group" of all ranks, the environment of "torchrun", or "none" of the two.

    Raises RanksFailed if a rank raises, dies, or has not ended after `timeout` seconds.
    """
    outcomes = run_to_end(function, world_size, *args, timeout=timeout, launch=launch)
    errors = [f"--- rank {o.rank} of {world_size} ---\n{o.error}" for o in outcomes if o.error]
    if errors:
        raise RanksFailed("\n".join(["", *errors]))
    return [outcome.value for outcome in outcomes]


def run_to_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    launch: Launch = "group",
    group_timeout: float = GROUP_TIMEOUT_SECONDS,
) -> list[Outcome]:
    """As run_ranks, but returns what became of each rank instead of raising."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        job = Job(function, args, world_size, launch, directory, find_free_port(), group_timeout)
        ranks = [_Rank(job, rank) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        context = _warm_context()
        self.rank = rank
        self.log = Path(job.directory, f"rank{rank}.log")
        self.pipe, pipe_of_rank = context.Pipe()
        self.process = context.Process(target=_run_rank, args=(job, rank, pipe_of_rank))
        self.process.start()
        pipe_of_rank.close()  # so that the death of the rank is the end of the pipe

    def receive(self) -> Outcome:
        try:
            value, error = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(GRACE_SECONDS)
            error = f"died, exit code {self.process.exitcode}"
            value = None
        return Outcome(self.rank, value, error and f"{error}\n{self.output()}")

    def dump_stack(self) -> None:
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-20_000:] if self.log.exists() else ""

    def end(self) -> None:
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _collect(ranks: Sequence[_Rank], deadline: float) -> list[Outcome]:
    waiting = {rank.pipe: rank for rank in ranks}
    outcomes: dict[int, Outcome] = {}
    while waiting and time.monotonic() < deadline:
        for ready in connection.wait(list(waiting), timeout=deadline - time.monotonic()):
            rank = waiting.pop(ready)
            outcomes[rank.rank] = rank.receive()
            if outcomes[rank.rank].error:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in waiting.values():
        rank.dump_stack()
    if waiting:
        time.sleep(0.5)  # the stacks are written by signal handlers
    for rank in waiting.values():
        outcomes[rank.rank] = Outcome(rank.rank, error=f"did not end; its stack:\n{rank.output()}")
    return [outcomes[rank.rank] for rank in ranks]


def _warm_context() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", __name__, "zerocore", *PRELOAD, "tests.distributed.warm"]
    )
    # The server does not inherit sys.path before Python 3.13.
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    os.environ["OMP_NUM_THREADS"] = "1"
    return context


def find_free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(job: Job, rank: int, pipe: Any) -> None:
    with open(Path(job.directory, f"rank{rank}.log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        faulthandler.enable(file=log)
        torch.set_num_threads(1)
        try:
            _launch(job, rank)
            answer = (job.function(*job.args), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(answer))
        _wait_for_end(pipe)
        # No teardown: a failed rank may hold a collective that will never end.
        os._exit(0)


def _wait_for_end(pipe: Any) -> None:
    """Stays until all ranks have answered: one that leaves early would fail the others."""
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()


def _launch(job: Job, rank: int) -> None:
    if job.launch == "group":
        store = dist.FileStore(str(Path(job.directory, "store")), job.world_size)
        timeout = timedelta(seconds=job.group_timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.world_size, timeout=timeout
        )
    elif job.launch == "torchrun":
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job.port),
            WORLD_SIZE=str(job.world_size),
            LOCAL_WORLD_SIZE=str(job.world_size),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            TORCHELASTIC_RUN_ID="tests",
        )
