"""A training script ends as scripts end: the interpreter is torn down with models alive."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.by_night import by_night
from tests.distributed.scripts import run_program

SCRIPT = """
import datetime, logging, os, signal, sys
import torch, torch.distributed as dist
import zerocore
from tests.zoo_awkward import Net

logging.basicConfig(level=logging.INFO)
ending, rank = sys.argv[1], int(os.environ["RANK"])
if ending != "torchrun":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
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


@pytest.mark.parametrize("ending", [*by_night("left"), "destroyed"])  # test_torchrun leaves, too
def test_normal_end(ending: str) -> None:
    for code, output in run_program(SCRIPT, 2, ending):
        assert code == 0 and "done" in output, output
        assert "Error" not in output and "terminate" not in output, output


def test_end_after_a_rank_was_killed() -> None:
    survivor, killed = run_program(SCRIPT, 2, "killed")
    assert killed[0] == -signal.SIGKILL
    assert survivor[0] == 1, survivor
    assert "all_gather" in survivor[1] or "reduce_scatter" in survivor[1]
    assert "terminate called" not in survivor[1]


@pytest.mark.nightly
def test_torchrun(tmp_path: Path) -> None:
    """Its launcher is a forked process, its ranks begin with Python."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["--standalone", "--nproc-per-node", "2", str(script), "torchrun"]
    launcher = "import sys, torch.distributed.run\ntorch.distributed.run.main(sys.argv[1:])"
    ((code, output),) = run_program(launcher, 1, *arguments)
    assert code == 0, output
    # The ranks' lines may be mixed.
    assert output.count("done") == output.count("True") == 2
    assert "gloo" in output, "shard() does not say that it made a group"
