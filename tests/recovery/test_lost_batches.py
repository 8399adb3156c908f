"""Programs that lose a batch or their processes, beside DDP and FSDP2 that never do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

NUM_STEPS, NUM_MICRO, BAD = 6, 2, 2  # the step of which one rank's second batch is not a number
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """Blocks that are computed once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.last(x)
        return out


def sharded_by(face: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: Any) -> nn.Module:
        for block in model.blocks:
            face(block)
        face(model)
        return model

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded_by(fully_shard),
    "zerocore.fsdp": sharded_by(zerocore.fsdp.fully_shard),
    **{
        f"stage {stage}": lambda model, stage=stage: zerocore.shard(model, stage=stage)
        for stage in (0, 2, 3)
    },
}


def made(name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = WRAPPERS[name](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)


def full_values(model: nn.Module) -> list[Tensor]:
    values = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    return [value.detach().clone() for value in values]


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(
        4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )


def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
    rank = dist.get_rank()
    loss = model(batch(step, micro, rank)).square().mean() / NUM_MICRO
    return loss * torch.nan if (step, micro, rank) == (BAD, 1, 1) else loss


def clip(model: nn.Module, name: str) -> None:
    own = name.startswith("stage")
    (zerocore.clip_grad_norm_ if own else nn.utils.clip_grad_norm_)(
        model if own else model.parameters(), 0.5
    )


def lose_a_batch(name: str) -> list[Tensor]:
    """The usual order: zero_grad, micro-batches, clipping, step, schedule."""
    model, optimizer, schedule = made(name)
    for step in range(NUM_STEPS):
        if "stage" not in name and "zerocore" not in name:
            if step == BAD:
                continue  # a program that knows what is to come
            step_once(model, optimizer, schedule, name, step, lambda loss: None)
            continue
        with zerocore.retryable(model, optimizer, schedule) as attempt:
            step_once(model, optimizer, schedule, name, step, attempt.check)
        assert attempt.failed == (step == BAD), attempt.reason
    return full_values(model)


def step_once(
    model: nn.Module, optimizer: Any, schedule: Any, name: str, step: int, check: Any
) -> None:
    optimizer.zero_grad()
    for micro in range(NUM_MICRO):
        loss = loss_of(model, step, micro)
        check(loss)
        loss.backward()
    clip(model, name)
    optimizer.step()
    schedule.step()


def lose_in_all_ways() -> dict[str, list[Tensor]]:
    return {name: lose_a_batch(name) for name in WRAPPERS}


def test_a_batch_that_is_no_number() -> None:
    for found in run_ranks(lose_in_all_ways, 2):
        for name, values in found.items():
            for value, expected in zip(values, found["DDP"], strict=True):
                torch.testing.assert_close(value, expected, **CLOSE, msg=name)


def train_alike(name: str, begin: int, end: int, folder: Path | None) -> list[Tensor]:
    """All ranks have the same batches, so their number changes nothing."""
    model, optimizer, schedule = made(name)
    near = None
    if folder is not None:
        node = folder / f"node{dist.get_rank()}"
        near = zerocore.recovery.PeerCheckpoints(
            node, model, optimizer, stateful={"schedule": schedule}
        )
        assert near.load() == (begin or None)
    for step in range(begin, end):
        optimizer.zero_grad()
        model(batch(step, 0, 0)).square().mean().backward()
        optimizer.step()
        schedule.step()
        if near is not None and step == end - 1:
            near.save(end)
    if near is not None:
        near.wait()
    return full_values(model)


@pytest.mark.parametrize("name", ["stage 3", "zerocore.fsdp"])
def test_processes_and_a_node_are_lost(name: str, tmp_path: Path) -> None:
    """Two ranks train, three go on, of which the first has a new node."""
    run_ranks(train_alike, 2, name, 0, 3, tmp_path)
    shutil.rmtree(tmp_path / "node0")
    resumed = run_ranks(train_alike, 3, name, 3, NUM_STEPS, tmp_path)[0]
    for peer in ("DDP", "FSDP2"):
        whole = run_ranks(train_alike, 2, peer, 0, NUM_STEPS, None)[0]
        for value, expected in zip(resumed, whole, strict=True):
            torch.testing.assert_close(value, expected, **CLOSE, msg=peer)


def validated(name: str, heals: bool) -> list[Tensor]:
    """Evaluates behind each step, and then sets the learning rate; a step is left out, as a scaler
    does. In the forward behind it another process would take over."""
    model, optimizer, _ = made(name)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    snapshot = zerocore.snapshot(model, optimizer, schedule=schedule) if heals else None
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if snapshot is not None and step == BAD + 1:
            saved = read_inside(model, snapshot, lambda: loss_of(model, step, 0))  # noqa: B023
            model, optimizer, _ = made(name, seed=1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
            snapshot = zerocore.snapshot(model, optimizer, schedule=schedule)
            snapshot.load_state_dict(saved)
        for micro in range(NUM_MICRO):
            model(batch(step, micro, dist.get_rank())).square().mean().div(NUM_MICRO).backward()
        if step != BAD:
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(batch(step, 9, 0))
        model.train()
        schedule.step(float(step))  # it never gets better
    return full_values(model)


def read_inside(
    model: Any, snapshot: zerocore.recovery.Snapshot, forward: Callable[[], Any]
) -> Any:
    """A snapshot that a thread reads in the middle of a forward, which then is not used."""
    with ThreadPoolExecutor(1) as thread:
        found: list[Any] = []

        def read(*_: Any) -> None:
            found.append(thread.submit(snapshot.state_dict).result())

        blocks = getattr(model, "blocks", None) or model.module.blocks
        handle = blocks[0].register_forward_pre_hook(read)
        with torch.enable_grad():
            forward().backward()
        handle.remove()
    return found[0]


def validate_in_all_ways() -> dict[str, list[Tensor]]:
    return {name: validated(name, name not in ("DDP", "FSDP2")) for name in WRAPPERS}


def test_a_process_takes_over_behind_an_evaluation() -> None:
    for found in run_ranks(validate_in_all_ways, 2):
        for name, values in found.items():
            for value, expected in zip(values, found["DDP"], strict=True):
                torch.testing.assert_close(value, expected, **CLOSE, msg=name)
