"""A user's program, which `make lint` checks with mypy: public names have the types that it needs.

A comment `type: ignore` names a mistake that mypy must find: one that it does not find is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import zerocore
from zerocore.fsdp import fully_shard


class Net(nn.Module):
    """With an attribute that `shard` must not make `Any`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


def main() -> None:
    """Shards, trains a step, saves and reads what one rank has."""
    model = zerocore.shard(
        Net(), stage=3, mixed_precision=None, communication=zerocore.Communication(prefetch=2)
    )
    assert_type(model, Net)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    checkpoints = zerocore.Checkpoints(
        "runs", model, optimizer, keep=2, stateful={"schedule": schedule}
    )
    first: int = checkpoints.load() or 0
    model(torch.ones(2, 4)).sum().backward()
    assert_type(zerocore.clip_grad_norm_(model, 1.0), Tensor)
    optimizer.step()
    checkpoints.save(first + 1).wait()
    assert_type(zerocore.describe(model), zerocore.reporting.Description)
    for param in model.parameters():
        if zerocore.is_sharded(param):
            start, end = param.shard_range
            assert param.local().numel() == end - start
            assert param.full_tensor().shape == param.shape  # still a parameter, too
        param.local()  # type: ignore[attr-defined]
    zerocore.shard(model, stages=2)  # type: ignore[call-arg]


def main_of_fsdp() -> None:
    """FSDP2's function returns the type of its argument, too."""
    assert_type(fully_shard(Net()), Net)
