"""Runs functions of `tests.gpu.rank_checks` on real ranks, which may share one GPU.

Each rank is a new process, because NCCL's library is chosen when a process starts. The ranks meet
in a file and talk over the loopback device, so no host name is resolved. A rank that is not done
after its time limit writes the stacks of all its threads and exits.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zerocore
from zerocore.model import units

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0  # of a rank; the tests of this folder end after 300 s
KILL_S = 10.0  # from a rank's limit until it is killed
GROUP_TIMEOUT = timedelta(seconds=30)


class RanksFailed(AssertionError):
    """A rank failed or hung; the message holds the output of every rank."""


def several_ranks_by_nccl(num_ranks: int) -> dict[str, str] | None:
    """The environment in which NCCL runs that many ranks on the GPUs here; None if it cannot."""
    if torch.cuda.device_count() >= num_ranks:
        return {}
    library = os.environ.get("ZEROCORE_NCCL", "")
    if not torch.cuda.is_available() or not Path(library).is_file():
        return None
    return {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}


def run_ranks(
    names: list[str],
    num_ranks: int,
    backend: str,
    device: torch.device,
    folder: Path,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the checks of these names, in order, on every rank. Raises RanksFailed.

    Args:
        backend: of the default group; "nccl_bound" is NCCL, bound to the device.
        folder: an empty one, for the store, the output of the ranks and their files.
        env: added to the environment of the ranks.
    """
    paths = [str(ROOT), str(Path(zerocore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    ours |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", __name__, backend, device.type, str(folder), str(num_ranks)]
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*command, str(rank), *names],
                    cwd=ROOT,
                    env={**os.environ, **ours, **(env or {})},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        codes = _wait(processes, time.monotonic() + LIMIT_S + KILL_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        texts = (log.read_text(errors="replace")[-8000:] for log in logs)
        raise RanksFailed(
            "\n".join(
                f"--- rank {rank}, exit code {code} ---\n{text}"
                for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
            )
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes; None of a process that does not end. After a failure the others get 10 s."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if any(codes):
            deadline = min(deadline, time.monotonic() + KILL_S)
        time.sleep(0.05)
    return [process.poll() or process.returncode for process in processes]


def main() -> None:
    """On each rank."""
    faulthandler.enable()  # also of a crash
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    backend, kind, folder, num_ranks, rank, *names = sys.argv[1:]
    from tests.gpu import rank_checks

    units.JOINED_NBYTES = 0  # small blocks are units, as in tests/conftest.py
    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend.removesuffix("_bound"),
        store=dist.FileStore(str(Path(folder) / "store"), int(num_ranks)),
        rank=int(rank),
        world_size=int(num_ranks),
        timeout=GROUP_TIMEOUT,
        device_id=device if backend.endswith("_bound") else None,
    )
    for name in names:
        began = time.perf_counter()
        getattr(rank_checks, name)(device, Path(folder))
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
