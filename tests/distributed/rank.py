"""The rank's side of the harness: a process that runs one function after the other, as a rank.

A function finds what it would find in a fresh process: the process group is made for it and ends
with it, random numbers begin anew. Whether it left anything else behind is looked at; a process
in which something is not as before runs no other function.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import is_
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from zerocore.model import units

Launch = Literal["group", "torchrun", "none"]


@dataclass(frozen=True)
class Job:
    """The work of one rank of a call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    launch: Launch
    store: str  # a file that is not there yet
    port: int
    group_timeout: float


def serve(pipe: Connection, log: Path) -> None:
    """Answers each pickled Job with its value and error, and then with whether all is as before.

    In between it stays until it is told that all ranks have answered: one that leaves early would
    fail the others. The process ends when the other end of the pipe is closed.
    """
    _write_all_to(log)
    gc.set_threshold(20_000)  # garbage is collected behind each function
    torch.set_num_threads(1)
    units.JOINED_NBYTES = 0  # small blocks are units, as large ones are
    random_states = torch.get_rng_state(), random.getstate()
    before = surroundings()
    while (message := _receive(pipe)) is not None:
        torch.set_rng_state(random_states[0])
        random.setstate(random_states[1])
        pipe.send_bytes(_run(message))
        if _receive(pipe) is None:
            break
        has_mesh = _has_mesh()
        _end_group()
        os.truncate(log, 0)
        after = surroundings()
        pipe.send_bytes(pickle.dumps(not has_mesh and not changes(before, after)))
        before = after
    # No teardown: a failed rank may hold a collective that will never end.
    os._exit(0)


def _write_all_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    faulthandler.enable(file=2)


def _receive(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


def _run(message: bytes) -> bytes:
    try:
        job: Job = pickle.loads(message)
        _launch(job)
        answer = (job.function(*job.args), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    sys.stdout.flush()
    return pickle.dumps(answer)


def _launch(job: Job) -> None:
    if job.launch == "group":
        store = dist.FileStore(job.store, job.world_size)
        timeout = timedelta(seconds=job.group_timeout)
        dist.init_process_group(
            "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
        )
    elif job.launch == "torchrun":
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job.port),
            WORLD_SIZE=str(job.world_size),
            LOCAL_WORLD_SIZE=str(job.world_size),
            RANK=str(job.rank),
            LOCAL_RANK=str(job.rank),
            TORCHELASTIC_RUN_ID="tests",
        )


def _end_group() -> None:
    """Models end first, as their engines use the group.

    Modules and caches are left: the collections of the next functions leave them out.
    """
    gc.collect()
    gc.freeze()
    if dist.is_initialized():
        dist.destroy_process_group()


class Surroundings(NamedTuple):
    """The state of a process that a function may change for the next one."""

    settings: dict[str, Any]  # of the process
    names: dict[Any, dict[str, Any]]  # of zerocore's modules and their classes


def surroundings() -> Surroundings:
    """As they are now."""
    names: dict[Any, dict[str, Any]] = {
        name: dict(vars(module))
        for name, module in sys.modules.items()
        if name.split(".", 1)[0] == "zerocore"
    }
    classes = {each for of in names.values() for each in of.values() if isinstance(each, type)}
    names |= {each: dict(vars(each)) for each in classes if each.__module__ in names}
    settings = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "threads": _num_threads(),
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "warnings": list(warnings.filters),
        "log": list(logging.getLogger("zerocore").handlers),
    }
    return Surroundings(settings, names)


def _num_threads() -> int:
    """Without the one that torch's compiler leaves for its progress bars."""
    return sum(thread.name != "tqdm_monitor" for thread in threading.enumerate())


def changes(before: Surroundings, after: Surroundings) -> list[str]:
    """Names of what was there before and is not, or is something else."""
    settings, now = before.settings, after.settings
    found = [name for name in settings if settings[name] != now[name]]
    for owner, names in before.names.items():
        others = after.names.get(owner, {})
        is_as_before = len(names) == len(others) and all(map(is_, names.values(), others.values()))
        if not is_as_before:  # a module may have state of its own
            found += [
                f"{owner}: {key}"
                for key, value in names.items()
                if (callable(value) or key.strip("_").isupper()) and others.get(key) is not value
            ]
    return found


def _has_mesh() -> bool:
    """DTensor's caches know meshes, and these their groups by names that come again."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    return any(group.group_desc.startswith("mesh_") for group in groups)
