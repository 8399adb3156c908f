"""Which parameters may differ between ranks before the first rank's values are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from tests.reported import warnings_of
from zerocore.common.agreement import checksum
from zerocore.sharding import unequal_values


class Mixed(nn.Module):
    """A shared trunk, experts, constants, and numbers that follow from a rule."""

    def __init__(self, shared: int, own: int) -> None:
        super().__init__()
        torch.manual_seed(shared)
        self.trunk = nn.Linear(6, 6)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        torch.manual_seed(own)
        self.experts = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(5)])
        self.norm = nn.LayerNorm(6)
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.experts[0](self.trunk(x)))


def cases(rank: int, half: int) -> dict[str, tuple[int, int]]:
    """Seeds of what is shared and of the experts, on a rank of 4."""
    return {
        "equal": (0, 0),
        "no seed": (rank, rank + 10),
        "seeds by host": (rank // 2, rank // 2 + 10),
        "first rank loads all": (int(rank == 0), int(rank == 0) + 10),
        "first rank loads a part": (0, int(rank == 0)),
        "an expert on each rank": (0, rank),  # as a new head of a pretrained model without a seed
        "expert parallelism 2 x 2": (0, rank % half),
    }


def shard_all(stage: int) -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for name, seeds in cases(rank, 2).items():
        model = Mixed(*seeds)
        first = {key: value.detach().clone() for key, value in model.named_parameters()}
        dist.broadcast_object_list(everyone := [first])
        with warnings_of("zerocore") as messages:
            try:
                zerocore.shard(model, stage=stage)
            except ValueError as error:
                found[name] = f"error: {error}"
                continue
        found[name] = messages[0] if messages else ""
        for key, value in model.named_parameters():
            assert torch.equal(full_of(value), everyone[0][key]), (name, key)
    kept = zerocore.shard(Mixed(0, rank % 2), stage=stage, sync_params=False)  # on purpose
    kept(torch.ones(2, 6))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_values_that_differ(stage: int) -> None:
    all_found = run_ranks(shard_all, 4, stage)
    for rank, found in enumerate(all_found):
        quiet = ("equal", "no seed", "seeds by host", "first rank loads all")
        assert all(found[name] == "" for name in (*quiet, "first rank loads a part"))
        error = found["expert parallelism 2 x 2"]
        assert error.startswith("error: group: ranks 0, 2 have other values of 'experts.0.weight'")
        assert "and 2 more than ranks 1, 3" in error and "Name them in groups=" in error
        warning = found["an expert on each rank"]
        if rank == 0:
            assert (
                "different values of 'experts.0.weight'" in warning and "'trunk.weight'" in warning
            )
        else:
            assert warning == ""


def shard_two() -> list[str]:
    with warnings_of("zerocore") as messages:
        zerocore.shard(Mixed(0, dist.get_rank()))
        zerocore.shard(Mixed(dist.get_rank(), dist.get_rank()))
        with torch.device("meta"):
            zerocore.shard(nn.Linear(4, 4), device=torch.device("cpu"))
    return messages


def test_two_ranks_with_experts_of_their_own() -> None:
    first, second = run_ranks(shard_two, 2)
    assert len(first) == 1 and "experts.0.weight" in first[0] and second == []


def test_checksums_see_every_layout() -> None:
    torch.manual_seed(0)
    kinds = (torch.randn(4, 6), torch.randn(4, 6).T, torch.randn(3, dtype=torch.cfloat))
    for tensor in (*kinds, torch.randn(4).to(torch.float8_e4m3fn), torch.randn(2).bfloat16()):
        changed = tensor.clone()
        changed[0] = 3
        assert checksum(tensor) == checksum(tensor.clone())
        assert checksum(tensor) != checksum(changed)
        assert not unequal_values._is_constant(tensor)
    for tensor in (torch.ones(3, 2).T, torch.zeros(0), torch.full((2,), 3)):
        assert unequal_values._is_constant(tensor)
