"""One rank's part of a job: it plays programs and writes down how each one ended."""

from __future__ import annotations

import faulthandler
import pickle
import random
import re
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.optimizers.trained import programs_of
from tests.distributed.programs.registry import Program, all_programs, broken_programs
from tests.distributed.programs.run import State
from tests.distributed.programs.systems import FOR_OPTIMIZERS, PEERS, SYSTEMS

ZEROCORE = str(Path(__file__).resolve().parents[3] / "zerocore")
DELIBERATE = (ValueError, TypeError, RuntimeError, NotImplementedError)
OUR_WORDS = ("zerocore", "shard", "unit '", "parameter '", "gradient of '")  # of the C++ core
NO_PARTNER = (
    "Timed out", "Connection closed", "Connection reset", "Broken pipe", "timeout",
    "ZEROCORE_STALL_SECONDS",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One job, the same for every rank."""

    system: str
    names: tuple[str, ...]
    directory: str
    port: int
    group_seconds: float


@dataclass(frozen=True)
class Error:
    """An exception: the first line of its message, and whether it was meant to be read."""

    text: str
    deliberate: bool
    no_partner: bool
    trace: str


@dataclass
class Played:
    """How one program ended on one rank."""

    name: str
    records: list[Any] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    error: Error | None = None


def play(job: Job) -> None:
    """Plays the programs one after the other; stops behind one that the ranks do not agree on."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", job.port, dist.get_world_size(), rank == 0)
    programs = all_programs() | broken_programs() | programs_of(job.names)
    with open(Path(job.directory, f"rank{rank}.pkl"), "wb") as file:
        for index, name in enumerate(job.names):
            print(name, flush=True)  # shown if the rank fails
            # Ends a rank that computes forever; one that waits for others ends by itself before.
            faulthandler.dump_traceback_later(2 + 3 * job.group_seconds, exit=True)
            played = play_one(programs[name], job.system)
            pickle.dump(played, file)
            file.flush()
            endings = exchange(store, str(index), played, job.group_seconds)
            faulthandler.cancel_dump_traceback_later()
            if len(endings) > 1 or (played.error and played.error.no_partner):
                break
            if played.error:
                fresh_group(job, index)
    exchange(store, "end", Played("end"), job.group_seconds)  # rank 0 holds the store


def play_one(program: Program, system: str) -> Played:
    """Runs one program with seeds of its own."""
    seed = zlib.crc32(program.name.encode()) % 100_000
    torch.manual_seed(seed)
    random.seed(seed)
    played = Played(program.name)
    try:
        run = (SYSTEMS | FOR_OPTIMIZERS)[system](seed, program.unused)
        program.function(run)
        played.records, played.states = run.records, run.final_states()
    except (Exception, CheckpointException) as error:
        played.error = describe(error, system)
    return played


def describe(error: BaseException, system: str) -> Error:
    """The table's words for an exception."""
    if isinstance(error, CheckpointException):  # what some ranks raised, in an envelope
        error = next(iter(error.failures.values()))[0]
    frames = traceback.extract_tb(error.__traceback__)
    text = (str(error).strip().splitlines() or [""])[0]
    no_partner = any(words in str(error) for words in NO_PARTNER)
    meant = isinstance(error, DELIBERATE) and "INTERNAL ASSERT" not in str(error)
    if system not in PEERS:
        raised = any(
            last.filename.startswith(ZEROCORE) and str(last.line).startswith("raise")
            for last in frames[-1:]
        )
        meant = meant and (raised or any(word in str(error) for word in OUR_WORDS))
    trace = "".join(traceback.format_exception(error))
    return Error(f"{type(error).__name__}: {text}", meant, no_partner, trace)


def exchange(store: dist.Store, key: str, played: Played, seconds: float) -> set[str]:
    """How the ranks ended, each once; a rank that does not come counts as an ending, too.

    Messages that differ in numbers alone, those of each rank's shards, are the same ending.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ending = re.sub(r"\d+", "#", played.error.text) if played.error else "done"
    store.set(f"{key}/{rank}", ending)
    endings = set()
    for other in range(world_size):
        try:
            store.wait([f"{key}/{other}"], timedelta(seconds=seconds + 2))
            endings.add(store.get(f"{key}/{other}").decode())
        except Exception:
            endings.add("did not end")
    return endings


def fresh_group(job: Job, index: int) -> None:
    """A new default group: what a program that raised has left in the old one is gone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    path = str(Path(job.directory, f"store{index}"))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=job.group_seconds),
    )


def read_played(job: Job, rank: int) -> Iterator[Played]:
    """A rank's results, also if it died later."""
    path = Path(job.directory, f"rank{rank}.pkl")
    if not path.exists():
        return
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
