"""``zerocore.fsdp`` trains as ``torch.distributed.fsdp`` does, beside it on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.distributed.harness import run_ranks
from tests.fsdp.both import Trained, check_same, shard_blocks, train, train_both


def run_plain(fsdp: Any, model: nn.Module) -> Trained:
    return train(shard_blocks(fsdp, model))


def train_plain() -> None:
    check_same(train_both(run_plain))


@pytest.mark.one_by_day
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_parameters_are_those_of_fsdp2(world_size: int) -> None:
    run_ranks(train_plain, world_size)
