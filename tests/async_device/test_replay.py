"""Records a unit's work in one step and replays it on the device in later steps.

CUDA graphs of single blocks need this: a block's own forward and backward wait for nothing, and
find weights, activations and gradients at the addresses of the step before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.async_device.device import load
from tests.async_device.test_offload import backward
from tests.async_device.training import Block, start
from tests.distributed.harness import run_ranks
from tests.distributed.values import own_of

NUM_STEPS = 8
RECORDED_STEP = 4


class Recorded:
    """Records this thread's work, for replays instead of it."""

    def __init__(self) -> None:
        self.work: Any = None

    def __enter__(self) -> None:
        load().begin_recording()

    def __exit__(self, *_: object) -> None:
        self.work = load().end_recording()


class Region(torch.autograd.Function):
    """A block's own compute: runs it and records it, or replays the recorded work."""

    @staticmethod
    def forward(ctx: Any, block: ReplayedBlock, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block = block
        if block.mode == "record":
            block.x = torch.empty_like(x)
        block.x.copy_(x)
        if block.mode == "replay":
            block.forward_work.work.replay()
        else:
            with torch.enable_grad(), block.forward_work:
                leaf = block.x.detach().requires_grad_(x.requires_grad)
                block.y = Block.forward(block, leaf)
            block.inputs = [*([leaf] if x.requires_grad else []), *params]
        return block.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        block: ReplayedBlock = ctx.block
        if block.mode == "record":
            block.grad_y = torch.empty_like(grads[0])
        block.grad_y.copy_(grads[0])
        if block.mode == "replay":
            block.backward_work.work.replay()
        else:
            with block.backward_work:
                block.grads = torch.autograd.grad(block.y, block.inputs, block.grad_y)
        missing = [None] * (1 + len(ctx.needs_input_grad[1:]) - len(block.grads))
        return (*missing, *(grad.detach() for grad in block.grads))


class ReplayedBlock(Block):
    """A unit whose modules run unless its work is replayed."""

    x: Tensor
    y: Tensor
    grad_y: Tensor
    inputs: list[Tensor]
    grads: tuple[Tensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.mode = "plain"
        self.forward_work, self.backward_work = Recorded(), Recorded()

    def forward(self, x: Tensor) -> Any:
        if self.mode == "plain":
            return super().forward(x)
        return Region.apply(self, x, *self.parameters())


def mode_of(step: int) -> str:
    return "plain" if step < RECORDED_STEP else "record" if step == RECORDED_STEP else "replay"


def move(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Moves the model to other device memory; returns tensors that take its old memory."""
    with zerocore.parked(model):
        sizes = range(512, 200_000, 512)
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def train(replays: bool, stage: int, moves: bool = False) -> list[list[float]]:
    """Returns the losses and, at the end, this rank's weights."""
    device, _ = start(on_device=True)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(ReplayedBlock() for _ in range(4))).to(device)
    model: Any = zerocore.shard(blocks, stage=stage, units=[Block])
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        for block in model:
            block.mode = mode_of(step) if replays else "plain"
        kept = move(model, device) if moves and step == RECORDED_STEP + 2 else []
        losses.append(backward(model, device, step))
        optimizer.step()
        optimizer.zero_grad()
        del kept
    if replays:
        assert all(len(block.forward_work.work) > 0 for block in model)
        assert all(len(block.backward_work.work) > 0 for block in model)
    weights = [own_of(param).flatten().tolist() for param in model.parameters()]
    return [torch.stack(losses).tolist(), *weights]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_that_replay_a_recorded_one_train_as_plain_ones(stage: int) -> None:
    plain = run_ranks(train, 2, False, stage, launch="torchrun")
    assert run_ranks(train, 2, True, stage, launch="torchrun") == plain


def test_replays_of_a_model_that_has_moved_are_wrong() -> None:
    """This shows that the test above depends on the addresses."""
    plain = run_ranks(train, 2, False, 3, True, launch="torchrun")
    assert run_ranks(train, 2, True, 3, True, launch="torchrun") != plain
