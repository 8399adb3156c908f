"""Training that goes on from a checkpoint: the same bits, or the same state on other ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.torch_version import TorchVersion

import zerocore
from tests.by_night import by_night
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states, make, trained
from tests.distributed.harness import run_ranks
from zerocore.checkpoint.convert import open_weights

OTHER_PYTHON = os.environ.get("ZEROCORE_OTHER_TORCH")  # a Python with another version of torch
STEPS = 20


class Run:
    """Dropout, random batches, a scheduler, a scaler of the loss."""

    def __init__(self, folder: Path, stage: int, seed: int) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 4))
        self.model = zerocore.shard(net, stage=stage)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        torch.manual_seed(seed + dist.get_rank())
        self.checkpoints = zerocore.Checkpoints(
            folder,
            self.model,
            self.optimizer,
            stateful={"schedule": self.schedule, "scaler": self.scaler},
        )

    def train(self, steps: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(steps):
            loss = self.model(torch.randn(8, 16)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
            found.append((loss.item(), self.scaler.get_scale()))
        return found


def go_on(folder: Path) -> None:
    for stage in (1, 3):
        place = folder / f"{stage}"
        first = Run(place, stage, 0)
        first.train(7)
        first.checkpoints.save(7)
        expected = first.train(STEPS)
        first.checkpoints.wait()
        assert len({scale for _, scale in expected}) > 2
        second = Run(place, stage, 1)
        assert second.checkpoints.load() == 7
        assert second.train(STEPS) == expected
        assert_equal(
            full_states(second.model, second.optimizer), full_states(first.model, first.optimizer)
        )


def test_twenty_steps_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(go_on, 2, tmp_path, timeout=120.0)


def save_all(folder: Path) -> None:
    for stage in range(4):
        model, optimizer = trained(stage)
        place = folder / f"{dist.get_world_size()}-{stage}"
        zerocore.Checkpoints(place, model, optimizer).save(1).wait()
        states = full_states(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(states, place / "expected.pt")


def load_all(folder: Path) -> None:
    places = sorted(folder.iterdir())
    for stage in range(4):
        model = make(stage, 9)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for place in places[(stage + dist.get_world_size()) % 4 :: 4]:  # each at one stage
            assert zerocore.Checkpoints(place, model, optimizer).load() == 1
            assert_equal(full_states(model, optimizer), torch.load(place / "expected.pt"))


@pytest.mark.parametrize("sizes", [*by_night(((1, 2, 3, 4),)), (1, 3)])
def test_all_numbers_of_ranks_and_stages(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Saved on 1 to 4 ranks at each stage, loaded on 1 to 4 ranks at another stage each."""
    for size in sizes:
        run_ranks(save_all, size, tmp_path, timeout=120.0)
    assert len(list(tmp_path.iterdir())) == 4 * len(sizes)
    for size in sizes:
        run_ranks(load_all, size, tmp_path, timeout=120.0)


def relay(folder: Path, step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = zerocore.shard(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    assert checkpoints.load() == (step - 1 or None)
    torch.manual_seed(step)
    model(torch.randn(6, 9)).square().sum().backward()
    optimizer.step()
    checkpoints.save(step).wait()
    return full_states(model, optimizer)


def test_fewer_and_fewer_ranks(tmp_path: Path) -> None:
    """4, 3, 2 and 1 ranks, one step each on equal batches: as one rank does all of them."""
    for step, world_size in enumerate((4, 3, 2, 1), 1):
        last = run_ranks(relay, world_size, tmp_path / "fewer", step)[0]
        alone = run_ranks(relay, 1, tmp_path / "alone", step)[0]
    for part in ("model", "state"):
        for key, value in alone[part].items():
            torch.testing.assert_close(last[part][key], value, rtol=1e-4, atol=1e-5)


READ = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
folder, out = sys.argv[1:]
facts = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {
    key: torch.empty(fact.size, dtype=fact.properties.dtype)
    for key, fact in facts.items()
    if isinstance(fact, TensorStorageMetadata)
}
dcp.load(state, checkpoint_id=folder, no_dist=True)
torch.save(state, out)
print(torch.__version__)
"""
WRITE = """
import sys, torch
import torch.distributed.checkpoint as dcp
state = torch.load(sys.argv[2])
dcp.save(state, checkpoint_id=sys.argv[1], no_dist=True)
"""


def save_for_others(folder: Path) -> dict[str, Any]:
    model, optimizer = trained(3)
    zerocore.Checkpoints(folder, model, optimizer).save(1).wait()
    return full_states(model, optimizer)


def load_of_others(folder: Path, expected: dict[str, Any]) -> None:
    model = make(3, 4)
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(model.state_dict())
    found = zerocore.full_state_dict(model, rank0_only=False)
    for key, value in expected["model"].items():
        assert torch.equal(found[key], value), key


@pytest.mark.skipif(OTHER_PYTHON is None, reason="ZEROCORE_OTHER_TORCH names no Python")
def test_another_version_of_torch_reads_and_writes(tmp_path: Path) -> None:
    """Of files alone: the other Python needs torch, and no zerocore."""
    expected = run_ranks(save_for_others, 2, tmp_path)[0]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    saved, out, written = tmp_path / "step-00000001", tmp_path / "out.pt", tmp_path / "written"
    for script, folder in ((READ, saved), (WRITE, written)):
        command = [OTHER_PYTHON, "-c", script, str(folder), str(out)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        if script is READ:
            other = TorchVersion(done.stdout.split("+")[0])
            assert other != torch.__version__.split("+")[0]
    read = torch.load(out)
    for key, value in expected["model"].items():
        assert torch.equal(read[f"model.{key}"], value), key
    for key, value in expected["state"].items():
        assert torch.equal(read[f"optim.state.{key}"], value), key
    # Before 2.15 torch cannot read what later releases save; zerocore can.
    if other < "2.15" or torch.__version__ >= "2.15":
        run_ranks(load_of_others, 2, written, expected)
    weights = open_weights(written)
    for key, value in expected["model"].items():
        assert torch.equal(weights.read(key), value), key
