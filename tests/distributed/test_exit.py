"""A training script ends as scripts end: the interpreter is torn down with models alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.by_night import by_night
from tests.distributed.harness import REPOSITORY

TIMEOUT_SECONDS = 90.0
GROUP_TIMEOUT_SECONDS = 6

SCRIPT = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
import zerocore
from tests.zoo_awkward import Net

ending, rank = sys.argv[1], int(os.environ["RANK"])
if ending != "torchrun":
    timeout = datetime.timedelta(seconds=int(os.environ["GROUP_TIMEOUT"]))
    dist.init_process_group("gloo", timeout=timeout)
model = zerocore.shard(Net())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    if ending == "killed" and rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(2, 5), rank, False).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
pending = model(torch.randn(2, 5), rank, False)
if ending == "destroyed":
    dist.destroy_process_group()
print("done", dist.is_initialized())
"""


def environment(directory: Path, **more: str) -> dict[str, str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GROUP_TIMEOUT": str(GROUP_TIMEOUT_SECONDS),
        **more,
    }


def run_script(
    directory: Path, ending: str, port: int, text: str = SCRIPT
) -> list[tuple[int, str]]:
    """Exit code and output of both ranks."""
    script = directory / "train.py"
    script.write_text(text)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), ending],
            env=environment(
                directory, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        outputs = [rank.communicate(timeout=deadline - time.monotonic())[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("ending", [*by_night("left"), "destroyed"])  # test_torchrun leaves, too
def test_normal_end(tmp_path: Path, free_port: int, ending: str) -> None:
    for code, output in run_script(tmp_path, ending, free_port):
        assert code == 0 and "done" in output, output
        assert "Error" not in output and "terminate" not in output, output


def test_end_after_a_rank_was_killed(tmp_path: Path, free_port: int) -> None:
    survivor, killed = run_script(tmp_path, "killed", free_port)
    assert killed[0] == -signal.SIGKILL
    assert survivor[0] == 1, survivor
    assert "all_gather" in survivor[1] or "reduce_scatter" in survivor[1]
    assert "terminate called" not in survivor[1]


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launch, str(script), "torchrun"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    # The ranks' lines may be mixed.
    assert result.stdout.count("done") == result.stdout.count("True") == 2
    assert "gloo" in result.stderr, "shard() does not say that it made a group"
