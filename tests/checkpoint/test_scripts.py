"""Scripts that save large files give the same as under DDP and FSDP2 with torch's own files."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.io.page_cache import drop_from_cache
from zerocore._C import FileWriter

WIDTH, LAYERS, WORLD_SIZE = 1024, 6, 2
Shard = Callable[[nn.Module], nn.Module]


class TorchFiles:
    """torch's writer, as DDP and FSDP2 are used with it."""

    def __init__(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states}

    def save(self, step: int) -> None:
        dcp.save(self.state(), checkpoint_id=self.folder / f"{step}")

    def load(self, step: int) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder / f"{step}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


SYSTEMS: dict[str, tuple[Shard, Any]] = {
    "ddp": (DistributedDataParallel, TorchFiles),
    "fsdp2": (lambda model: fully_shard(model), TorchFiles),
    "stage 1": (lambda model: zerocore.shard(model, stage=1), zerocore.Checkpoints),
    "stage 3": (lambda model: zerocore.shard(model, stage=3), zerocore.Checkpoints),
}


def make(shard: Shard) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model: Any, index: int) -> float:
    torch.manual_seed(100 * index + dist.get_rank())
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    return float(loss)


def step(model: Any, optimizer: Any, index: int) -> float:
    loss = backward(model, index)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def resume_in_a_new_model(shard: Shard, files: Any, folder: Path) -> list[float]:
    """Saves between two micro-batches while training goes on, then begins there from the disk."""
    model, optimizer = make(shard)
    checkpoints = files(folder, model, optimizer)
    seen = [step(model, optimizer, index) for index in range(2)]
    seen.append(backward(model, 2))
    checkpoints.save(2)  # gradients are no part of it
    seen += [step(model, optimizer, index) for index in (3, 4)]
    if isinstance(checkpoints, zerocore.Checkpoints):
        checkpoints.wait()
    dist.barrier()
    for path in folder.rglob(f"__{dist.get_rank()}_*"):
        drop_from_cache(path)
    model, optimizer = make(shard)
    files(folder, model, optimizer).load(2)
    seen.append(backward(model, 2))
    again = [step(model, optimizer, index) for index in (3, 4, 5)]
    assert again[:2] == seen[3:5]
    return seen + again


def go_back_twice(shard: Shard, files: Any, folder: Path) -> list[float]:
    """A step that went wrong is undone in place, from the file that was just saved, and again."""
    model, optimizer = make(shard)
    checkpoints, seen = files(folder, model, optimizer), []
    for index in range(4):
        seen.append(step(model, optimizer, index))
        if index == 1:
            checkpoints.save(index)
        if index in (2, 3):
            for group in optimizer.param_groups:
                group["lr"] *= 1000.0
            seen.append(step(model, optimizer, 10 + index))
            checkpoints.load(1)
            assert optimizer.param_groups[0]["lr"] == 1e-3
    return [*seen, step(model, optimizer, 6)]


def fall_back(shard: Shard, files: Any, folder: Path) -> list[float]:
    """A new process finds that the newest checkpoint lacks a file, and takes the one before."""
    model, optimizer = make(shard)
    checkpoints, seen = files(folder, model, optimizer), []
    for index in range(4):
        seen.append(step(model, optimizer, index))
        if index in (1, 3):
            checkpoints.save(index)
    if isinstance(checkpoints, zerocore.Checkpoints):
        checkpoints.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        next(path for path in folder.rglob("__0_0.distcp") if path.parent.name[-1] == "3").unlink()
    dist.barrier()
    model, optimizer = make(shard)
    checkpoints = files(folder, model, optimizer)
    with pytest.raises((ValueError, RuntimeError, CheckpointException), match=r"__0_0\.distcp"):
        checkpoints.load(3)
    checkpoints.load(1)
    again = [step(model, optimizer, index) for index in (2, 3, 4)]
    assert again[:2] == seen[2:]
    return seen + again


def warm_start(shard: Shard, files: Any, folder: Path) -> list[float]:
    """Weights alone for another optimizer; the script collects garbage itself, between steps."""
    model, optimizer = make(shard)
    checkpoints = files(folder, model, optimizer)
    seen = [step(model, optimizer, index) for index in range(3)]
    checkpoints.save(3)
    if isinstance(checkpoints, zerocore.Checkpoints):
        checkpoints.wait()
    dist.barrier()
    gc.disable()
    try:
        model, _ = make(shard)
        if isinstance(checkpoints, zerocore.Checkpoints):
            files(folder, model).load()
        else:
            weights = get_model_state_dict(model)
            dcp.load({"model": weights}, checkpoint_id=folder / "3")
            set_model_state_dict(model, weights)
        assert not gc.isenabled()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        seen += [step(model, optimizer, index) for index in (3, 4, 5)]
    finally:
        gc.enable()
    return seen


def play(script: Any, name: str, folder: Path) -> list[float]:
    shard, files = SYSTEMS[name]
    return script(shard, files, folder / name.replace(" ", "-"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", [*by_night(go_back_twice, warm_start, fall_back), resume_in_a_new_model]
)
def test_large_files_give_the_same(script: Any, tmp_path: Path) -> None:
    numel = LAYERS * (WIDTH * WIDTH + WIDTH)
    assert 3 * 4 * numel / WORLD_SIZE > FileWriter.RING_NBYTES  # past the page cache
    found = {name: run_ranks(play, WORLD_SIZE, script, name, tmp_path) for name in SYSTEMS}
    for name, ranks in found.items():
        for rank, losses in enumerate(ranks):
            assert losses == pytest.approx(found["ddp"][rank], rel=1e-4), (name, rank)
