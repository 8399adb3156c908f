"""Units that use a module inside of a reentrant checkpoint and again after it."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks


class Twice(nn.Module):
    """One layer in a checkpoint, and in some steps again after it: the checkpoint's backward then
    computes gradients after all others of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True)
        return self.layer(x) if self.again else x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Twice(), nn.Linear(4, 2))


def train(stage: int) -> None:
    model, plain = net(), net()
    zerocore.shard(model, stage=stage, units=[*model])
    for step in range(6):
        for each in (model, plain):
            cast(Twice, each[1]).again = step in (2, 4)
            each(torch.ones(3, 4) * step).square().mean().backward()
            with torch.no_grad():
                for p in each.parameters():
                    p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
            each.zero_grad()
    full = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(full, dict(plain.state_dict()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_after_all_others_of_the_unit(stage: int) -> None:
    run_ranks(train, 2, stage)
