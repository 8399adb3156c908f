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
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

Launch = Literal["group", "torchrun", "none"]


@dataclass(frozen=True)
class Job:
    """What one rank of a call does."""

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
    torch.set_num_threads(1)
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

    What is left are modules and caches: the collections of the next functions leave them out.
    """
    gc.collect()
    gc.freeze()
    if dist.is_initialized():
        dist.destroy_process_group()


def surroundings() -> dict[Any, Any]:
    """What a function may change for the next one: settings, and what zerocore's modules define."""
    modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "zerocore"}
    found: dict[Any, Any] = {
        (name, key): value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if callable(value) or key.strip("_").isupper()
    }
    classes = {value for value in found.values() if isinstance(value, type)}
    for each in classes:
        if each.__module__ in modules:
            found |= {(each, key): value for key, value in vars(each).items() if callable(value)}
    return found | {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "threads": _num_threads(),
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "warnings": list(warnings.filters),
        "log": list(logging.getLogger("zerocore").handlers),
    }


def _num_threads() -> int:
    """Without the one that torch's compiler leaves for its progress bars."""
    return sum(thread.name != "tqdm_monitor" for thread in threading.enumerate())


def changes(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """Names of what was there before and is not, or is something else."""
    return [str(key) for key, value in before.items() if after.get(key) != value]


def _has_mesh() -> bool:
    """DTensor's caches know meshes, and these their groups by names that come again."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    return any(group.group_desc.startswith("mesh_") for group in groups)
