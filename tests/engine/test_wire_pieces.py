"""Units whose slices take several pieces on the wire, of odd sizes, beside DDP and FSDP2."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.recovery.test_lost_batches import CLOSE, WRAPPERS, clip, full_values, sharded_by

VOCABULARY, WIDTH, INNER = 1501, 601, 1003
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32)
NARROW: dict[str, Any] = {
    "FSDP2": sharded_by(partial(fully_shard, mp_policy=POLICY)),
    "zerocore.fsdp": sharded_by(partial(zerocore.fsdp.fully_shard, mp_policy=POLICY)),
    **{
        f"stage {stage}": partial(zerocore.shard, stage=stage, mixed_precision=MIXED)
        for stage in (0, 2, 3)
    },
}


class Tied(nn.Module):
    """A block and the tied embedding have slices of 2.4 MB and 1.8 MB on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, VOCABULARY)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def loss_of(model: nn.Module, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (4, 9), generator=draw)
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def made(wrap: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Tied())
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def accumulate_and_evaluate(name: str) -> list[Tensor]:
    """Two micro-batches a step, clipping, and an evaluation that is in the losses."""
    model, optimizer = made(WRAPPERS[name], 0)
    losses = []
    for step in range(3):
        for micro in range(2):
            loss_of(model, 2 * step + micro).div(2).backward()
        clip(model, name)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, 100 + step))
    return [*losses, *full_values(model)]


def resume_in_bfloat16(name: str) -> list[Tensor]:
    """Weights in 16 bit on the wire; the second half is that of another model. The last loss is
    that of its weights."""
    model, optimizer = made(NARROW[name], 0)
    losses = []
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = made(NARROW[name], 1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        loss = loss_of(model, step)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*losses, loss_of(model, 100)]


def compare(train: Any, names: list[str]) -> None:
    """With the first one's values."""
    expected, *others = ((name, train(name)) for name in names)
    for name, found in others:
        for value, wanted in zip(found, expected[1], strict=True):
            torch.testing.assert_close(
                value, wanted, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("world_size", [3, 2])
@pytest.mark.one_by_day
def test_accumulation_and_evaluation(world_size: int) -> None:
    run_ranks(compare, world_size, accumulate_and_evaluate, list(WRAPPERS))


def test_a_resume_in_bfloat16() -> None:
    run_ranks(compare, 2, resume_in_bfloat16, list(NARROW))
