"""Several units are reduced at a time in ordinary scripts, beside DDP and FSDP2."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.recovery.test_lost_batches import CLOSE, clip, full_values, sharded_by

WIDTH, NUM_BLOCKS, NUM_STEPS = 7, 4, 5
PEERS: dict[str, Any] = {
    "DDP": partial(DistributedDataParallel, find_unused_parameters=True),
    "FSDP2": sharded_by(fully_shard),
}


class Stack(nn.Module):
    """Blocks of which some are left out, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        inner = range(WIDTH, WIDTH + NUM_BLOCKS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for width in inner
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for block in order:
            x = x + self.blocks[block](x)
        out: Tensor = self.last(x)
        return out


def wrappers() -> dict[str, Any]:
    found = dict(PEERS)
    for stage, number in ((2, 2), (3, 2), (3, 3)):
        options: dict[str, Any] = {
            "stage": stage,
            "communication": zerocore.Communication(reductions_in_flight=number),
        }
        found[f"stage {stage}, {number} at a time"] = partial(zerocore.shard, **options)
        if dist.get_world_size() == 4:
            mesh = init_device_mesh("cpu", (2, 2))
            hybrid = partial(zerocore.shard, group=mesh, **options)
            found[f"stage {stage}, {number} at a time, hybrid"] = hybrid
    return found


def made(wrap: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Stack())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, number: int, order: list[int]) -> Tensor:
    draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
    loss: Tensor = model(torch.randn(3, WIDTH, generator=draw), order).square().mean()
    return loss


def drop_blocks_and_resume(wrap: Any, name: str) -> list[Tensor]:
    """Other blocks in each micro-batch, clipping, and a second model that goes on."""
    model, optimizer = made(wrap)
    losses = []
    for step in range(NUM_STEPS):
        for micro, order in enumerate(([0, 1, 2, 3], [3, step % 3, 1, 3])):
            loss = loss_of(model, 2 * step + micro, order)
            losses.append(loss.detach())
            loss.div(2).backward()
        clip(model, name)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = made(wrap, 1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return [*losses, *full_values(model)]


def fail_in_a_backward(wrap: Any, name: str) -> list[Tensor]:
    """A hook raises on all ranks when blocks behind it are being reduced; training goes on."""
    model, optimizer = made(wrap)
    order = list(range(NUM_BLOCKS))
    for step in range(NUM_STEPS):
        if step == 2:
            if name not in PEERS:  # those know what is to come
                fail_once(model, step, order)
        else:
            loss_of(model, step, order).backward()
            optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


def fail_once(model: Any, step: int, order: list[int]) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a label of no class")

    handle = model.blocks[0].register_full_backward_hook(fail)
    loss = loss_of(model, step, order)
    with pytest.raises(KeyError, match="a label of no class"):
        loss.backward()
    handle.remove()


def compare(train: Any) -> None:
    """With DDP's values."""
    expected: list[Tensor] = []
    for name, wrap in wrappers().items():
        found = train(wrap, name)
        expected = expected or found
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(
                value, wanted, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize(
    ("train", "world_size"),
    [
        *by_night((drop_blocks_and_resume, 2), (fail_in_a_backward, 4), (fail_in_a_backward, 2)),
        (drop_blocks_and_resume, 4),
    ],
)
def test_beside(train: Any, world_size: int) -> None:
    run_ranks(compare, world_size, train)
