"""Threads by the cores that a process may run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.scripts import run_program
from zerocore.common.host import host_threads, local_ranks, num_cores, update_threads

CHILD = """
import os
from zerocore.common.host import host_threads
cores = sorted(os.sched_getaffinity(0))
shared = [host_threads(ranks) for ranks in (1, 2, 1000)]
os.sched_setaffinity(0, cores[:1])
print(*shared, host_threads(1000))
"""


def test_processors_of_one_core_count_once(tmp_path: Path) -> None:
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    assert num_cores(range(8), tmp_path) == 4
    assert num_cores([0, 4], tmp_path) == 1
    assert num_cores([0, 5], tmp_path) == 2
    assert num_cores([0, 4], tmp_path / "nowhere") == 2


def test_ranks_share_the_cores_that_they_are_not_bound_to() -> None:
    """A child that may run where its parent may, then on one core only."""
    ((code, output),) = run_program(CHILD, 1)
    assert code == 0, output
    cores = num_cores(os.sched_getaffinity(0))
    assert [int(n) for n in output.split()] == [cores, max(1, cores // 2), 1, 1]
    assert 1 <= host_threads(1) <= cores


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),3", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun under srun
    ],
)
def test_ranks_of_this_machine_by_launcher(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "LOCAL"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == expected


def test_threads_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core is left to who feeds a device; torch's own number is the most beside the CPU."""
    monkeypatch.setattr("zerocore.common.host.num_cores", lambda _: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cpu, device = torch.device("cpu"), torch.device("cuda", 0)
    assert (update_threads(cpu), update_threads(device)) == (5, 11)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (update_threads(cpu), update_threads(device)) == (3, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert (update_threads(cpu), update_threads(device)) == (1, 1)
