"""Runs a function on real gloo ranks.

The processes are forked from a server that has imported torch, the models and zerocore once. One
that has run a function and holds nothing of it runs the next one (tests/distributed/rank.py), in a
process group of its own: a call on two ranks then costs a few hundredths of a second.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from tests.distributed.rank import Job, Launch, serve
from tests.zoo import PRELOAD

REPOSITORY = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0
GROUP_TIMEOUT_SECONDS = 30.0


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds every rank's traceback, stack and output."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with an error (traceback, death or hang)."""

    rank: int
    value: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    launch: Launch = "group",
    fresh: bool = False,
) -> list[Any]:
    """Calls `function(*args)` on every rank and returns the values in rank order.

    `function` is a module-level function. `launch` says what a rank finds: a default process
    "group" of all ranks, the environment of "torchrun", or "none" of the two. Ranks with a "group"
    may have run other functions before; `fresh` ones have not, for what is about the process.

    Raises RanksFailed if a rank raises, dies, or has not ended after `timeout` seconds.
    """
    outcomes = run_to_end(function, world_size, *args, timeout=timeout, launch=launch, fresh=fresh)
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
    fresh: bool = True,
    grace: float = GRACE_SECONDS,
) -> list[Outcome]:
    """As run_ranks, but returns what became of each rank instead of raising.

    ``grace``: seconds that the other ranks get to end after one has failed.
    """
    fresh = fresh or launch != "group"
    ranks = _fresh_ranks(world_size) if fresh else _take_ranks(world_size)
    store, port = str(_folder() / f"store{next(_numbers)}"), find_free_port()
    kept: list[_Rank] = []
    try:
        for rank, each in enumerate(ranks):
            job = Job(function, args, rank, world_size, launch, store, port, group_timeout)
            each.begin(job)
        outcomes = _collect(ranks, time.monotonic() + timeout, grace)
        if not fresh and not any(outcome.error for outcome in outcomes):
            kept = _clean_up(ranks)
        return outcomes
    finally:
        for each in ranks:
            if each not in kept:
                each.end()
        _idle[:0] = kept
        Path(store).unlink(missing_ok=True)


_idle: list[_Rank] = []  # processes without a function
_numbers = itertools.count()


def _take_ranks(number: int) -> list[_Rank]:
    """Each has been this rank before or is new: DTensor's caches know places in meshes."""
    taken = []
    for rank in range(number):
        own = next((each for each in _idle if each.rank == rank), None)
        if own is not None:
            _idle.remove(own)
        taken.append(own if own is not None and own.process.is_alive() else _Rank())
    return taken


def _fresh_ranks(number: int) -> list[_Rank]:
    return [_Rank() for _ in range(number)]


def _clean_up(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Lets all ranks end their groups; returns those that can run another function."""
    for rank in ranks:
        rank.pipe.send_bytes(b"all have answered")
    return [rank for rank in ranks if rank.is_as_before()]


def idle_processes() -> set[Any]:
    """Those that wait for a function to run."""
    return {rank.process for rank in _idle}


def end_idle_ranks() -> None:
    """Ends the processes that wait for a function to run."""
    while _idle:
        _idle.pop().end()


atexit.register(end_idle_ranks)  # before multiprocessing waits for its processes


@cache
def _folder() -> Path:
    """For logs and stores; removed with this process."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


class _Rank:
    """The parent's side of one process that is a rank, of one call after the other."""

    def __init__(self) -> None:
        context = _warm_context()
        self.rank = -1
        self.log = _folder() / f"rank{next(_numbers)}.log"
        self.pipe, pipe_of_rank = context.Pipe()
        self.process = context.Process(target=serve, args=(pipe_of_rank, self.log))
        self.process.start()
        pipe_of_rank.close()  # so that the death of the rank is the end of the pipe

    def begin(self, job: Job) -> None:
        self.rank = job.rank
        self.pipe.send_bytes(pickle.dumps(job))

    def receive(self) -> Outcome:
        try:
            value, error = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(GRACE_SECONDS)
            error = f"died, exit code {self.process.exitcode}"
            value = None
        return Outcome(self.rank, value, error and f"{error}\n{self.output()}")

    def is_as_before(self) -> bool:
        """Whether the process has ended its group and holds nothing of the function, in time."""
        try:
            return self.pipe.poll(GRACE_SECONDS) and pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            return False

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
        self.log.unlink(missing_ok=True)


def _collect(ranks: Sequence[_Rank], deadline: float, grace: float) -> list[Outcome]:
    waiting = {rank.pipe: rank for rank in ranks}
    outcomes: dict[int, Outcome] = {}
    while waiting and time.monotonic() < deadline:
        for ready in connection.wait(list(waiting), timeout=deadline - time.monotonic()):
            rank = waiting.pop(ready)
            outcomes[rank.rank] = rank.receive()
            if outcomes[rank.rank].error:
                deadline = min(deadline, time.monotonic() + grace)
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
    """A TCP port of this machine that nobody listens on, below those of Linux's connections: one of
    these may be taken by a connection before a store listens there."""
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
