"""Runs a function on every rank, in processes that are started here or by torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEFAULT_NUM_CPU_RANKS = 2


class LaunchError(ValueError):
    """The error of a request for ranks that cannot run here."""


@dataclass(frozen=True)
class Rank:
    """This process's rank, the world size, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `run_parsed` reads: the ranks and their device."""
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or 2")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def run_parsed(
    work: Callable[[Rank, Any], None], options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Calls `run_on_ranks` with options of `add_rank_options`; a LaunchError is a usage error."""
    try:
        run_on_ranks(work, options, num_ranks=options.ranks, device_type=options.device)
    except LaunchError as error:
        parser.error(str(error))


def run_on_ranks(
    work: Callable[[Rank, Any], None], options: Any, *, num_ranks: int | None, device_type: str
) -> None:
    """Calls `work(rank, options)` on every rank with the default process group initialised.

    Under torchrun this process is one rank already. Otherwise `num_ranks` processes are started
    (default: one per GPU, or 2 on the CPU); `work` must be importable by name and `options`
    picklable. `device_type` is "cpu", "cuda" (NCCL) or "auto". Raises LaunchError. If a rank
    fails, ends all others and raises ProcessRaisedException (with its traceback) or
    ProcessExitedException (with its signal), both of torch.multiprocessing.
    """
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join_torchrun(work, options, num_ranks, device_type)
        return
    num_gpus = torch.cuda.device_count()
    num_ranks = num_ranks or (num_gpus if device_type == "cuda" else DEFAULT_NUM_CPU_RANKS)
    if device_type == "cuda" and num_ranks > num_gpus:
        raise LaunchError(
            f"{num_ranks} ranks need as many GPUs, and {num_gpus} are visible; "
            "ask for fewer ranks or for the device cpu"
        )
    if device_type == "cpu":  # OpenMP reads it when a new process loads it
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="zerocore-") as folder:
        store = str(Path(folder) / "rendezvous")
        args = (work, options, num_ranks, device_type, store)
        mp.spawn(_run_spawned, args=args, nprocs=num_ranks, daemon=True)


def _join_torchrun(
    work: Callable[[Rank, Any], None], options: Any, num_ranks: int | None, device_type: str
) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    if num_ranks not in (None, world_size):
        raise LaunchError(
            f"asked for {num_ranks} ranks, but torchrun started {world_size}; "
            "leave the number of ranks to torchrun"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    rank = Rank(int(os.environ["RANK"]), world_size, _device(device_type, local_rank))
    _run_in_group(work, options, rank, "env://")


def _run_spawned(
    rank: int,
    work: Callable[[Rank, Any], None],
    options: Any,
    world_size: int,
    device_type: str,
    store: str,
) -> None:
    # mp.spawn sends SIGINT when the parent is gone. Handled by Python, or ignored as in jobs that a
    # shell starts in the background, it does not end a rank that waits inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # torchrun's variables, which trainers of other libraries read; the address is not used.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0")
    place = Rank(rank, world_size, _device(device_type, rank))
    _run_in_group(work, options, place, f"file://{store}")


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _run_in_group(
    work: Callable[[Rank, Any], None], options: Any, rank: Rank, init_method: str
) -> None:
    on_cpu = rank.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        init_method=init_method,
        rank=rank.rank,
        world_size=rank.world_size,
        device_id=None if on_cpu else rank.device,
    )
    work(rank, options)
    # Not in a `finally`: a rank that failed must drop its connections by exiting, not wait here.
    dist.destroy_process_group()
