"""Runs a function on every rank of a process group, each a new process on this host."""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from bench.lib.systems import import_zerocore

# One thread a rank; libraries that look for an accelerator find the CPU.
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
EMULATED = "emulated"
EMULATED_PRESET = "nvlink4"


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    backend: str = "gloo",
) -> list[Any]:
    """Calls `function(*args)` on `world_size` ranks and returns the results in rank order.

    `backend` is gloo, nccl (ranks share GPUs if there are too few) or emulated: one process that
    plays rank 0. `function` must be importable (spawned processes look it up by name) and its
    result picklable. Output of ranks is dropped; an error has the last lines of it. Raises
    RuntimeError with the failed rank's traceback, TimeoutError after `timeout_s` seconds; either
    way it kills all processes.
    """
    num_processes = 1 if backend == EMULATED else world_size
    saved = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
    os.environ.update(RANK_ENVIRONMENT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            call = (function, world_size, args, folder, timeout_s, backend)
            context = start_processes(
                _rank_main, call, nprocs=num_processes, join=False, start_method="spawn"
            )
            assert context is not None
            try:
                _join(context, timeout_s)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{_last_lines(Path(folder))}") from None
            return [
                pickle.loads((Path(folder) / f"result_{rank}").read_bytes())
                for rank in range(num_processes)
            ]
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_here(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    backend: str = "nccl",
) -> list[Any]:
    """Runs as `run_on_ranks`, in this process: on a GPU a start takes longer than the steps."""
    if backend == EMULATED:
        import_zerocore().emulate(world_size, EMULATED_PRESET)
    else:
        timeout = timedelta(seconds=timeout_s)
        store = dist.HashStore()
        dist.init_process_group(backend, rank=0, world_size=1, store=store, timeout=timeout)
    try:
        return [function(*args)]
    finally:
        dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()


def _join(context: ProcessContext, timeout_s: float) -> None:
    """Waits for all ranks; on failure, timeout or interrupt it kills the remaining ones."""
    try:
        deadline = time.monotonic() + timeout_s
        # join() also returns False when only some of the ranks have ended.
        while not context.join(timeout=1.0, grace_period=5.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not finish within {timeout_s:.0f} s")
    except ProcessException as error:
        raise RuntimeError(str(error)) from None
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _last_lines(folder: Path, num_lines: int = 10) -> str:
    """Returns the last lines of each rank's output."""
    parts = []
    for log in sorted(folder.glob("log_*")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
        parts.append("\n".join([f"{log.name}:", *lines]))
    return "\n".join(parts)


def _rank_main(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    folder: str,
    timeout_s: float,
    backend: str,
) -> None:
    with open(f"{folder}/log_{rank}", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    torch.set_num_threads(1)
    # Libraries expect these of a launcher; rendezvous itself goes through the file.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if backend == EMULATED:
        import_zerocore().emulate(world_size, EMULATED_PRESET)
    else:
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world_size,
            store=dist.FileStore(f"{folder}/store", world_size),  # type: ignore[attr-defined]
            timeout=timedelta(seconds=timeout_s),
        )
    result = function(*args)
    (Path(folder) / f"result_{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    # Skips the normal exit, which a peer's remaining threads can abort after the work is done.
    os._exit(0)
