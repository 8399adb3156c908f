"""Checkpointed layers that only some ranks call, with a loss inside: as with DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.model.test_joined_blocks import batch, full_state


class Routed(nn.Module):
    """A shared layer; `way` says whether a checkpoint calls it once more behind its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.shared, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, way: int) -> Tensor:
        x = self.out(torch.tanh(self.shared(torch.tanh(self.shared(self.inp(x))))))
        x, loss = checkpoint(self.route, x, way, use_reentrant=False)
        return x.square().mean() + 0.1 * loss

    def route(self, x: Tensor, way: int) -> tuple[Tensor, Tensor]:
        loss = self.shared(x).square().mean()
        return (self.shared(x) if way % 2 else x), loss


def wrap(system: str, model: nn.Module, stage: int) -> nn.Module:
    if system == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if system == "fsdp2":
        return fully_shard(model)
    return zerocore.shard(
        model, stage=stage, units=["shared"], communication=zerocore.Communication(prefetch=0)
    )


def evaluate_by_other_ways(system: str, stage: int) -> dict[str, Tensor]:
    """An evaluation between a forward and its backward, where each rank goes another way."""
    torch.manual_seed(0)
    model = wrap(system, Routed(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        way = hash((step, dist.get_rank()))
        loss = model(batch(step), way)
        with torch.no_grad():
            losses.append(model(batch(-step - 1), way // 2))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model) | {"losses": torch.stack(losses)}


def clip_and_go_on_in_a_new_model(system: str, stage: int) -> dict[str, Tensor]:
    """Two micro-batches a step, norms clipped, and a new model from the weights."""
    torch.manual_seed(0)
    model = wrap(system, Routed(), stage)
    losses = []
    for step in range(6):
        if step == 3:
            plain = Routed()
            plain.load_state_dict(full_state(model))
            model = wrap(system, plain, stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, part in enumerate(batch(step).chunk(2)):
            loss = model(part, step + number + dist.get_rank())
            (loss / 2).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model) | {"losses": torch.stack(losses)}


def compare(script: Callable[[str, int], dict[str, Tensor]], stage: int) -> None:
    expected = script("ddp", stage)
    for system in ("fsdp2", "zerocore"):
        torch.testing.assert_close(script(system, stage), expected)


@pytest.mark.parametrize("script", [evaluate_by_other_ways, clip_and_go_on_in_a_new_model])
def test_scripts_train_as_with_ddp_and_fsdp2(
    script: Callable[[str, int], dict[str, Tensor]], stage: int
) -> None:
    run_ranks(compare, 3, script, stage)
