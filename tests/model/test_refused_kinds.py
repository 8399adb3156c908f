"""Parameters and modules that cannot be sharded rightly are refused by name on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import RanksFailed, run_ranks
from tests.sharding.test_errors import still_works


def shard_odd_kinds() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distributed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    distributed[1].weight = nn.Parameter(weight)
    complex_layer = nn.Sequential(nn.Linear(2, 2).to(torch.complex32))
    narrow = nn.Sequential(nn.Linear(2, 2).to(torch.float8_e4m3fn))
    for stage in range(4):
        for model, named in (
            (distributed, "parameter '1.weight' is a DTensor"),
            (complex_layer, "parameter '0.weight' of dtype torch.complex32"),
            (narrow, "parameter '0.weight' of dtype torch.float8_e4m3fn"),
        ):
            with pytest.raises(ValueError, match=named):
                zerocore.shard(model, stage=stage)
    still_works(3)


def test_kinds_that_are_refused() -> None:
    run_ranks(shard_odd_kinds, 2)


def look_up(stage: int, kind: type[nn.Embedding | nn.EmbeddingBag], same: bool) -> None:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Sequential(kind(8, 4, max_norm=0.5)), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.arange(4).view(2, 2) + (0 if same else 4 * dist.get_rank())
    for _ in range(2):
        output = model(rows)
        assert output.norm(dim=-1).max() < 0.51
        output.sum().backward()
        optimizer.step()
    model(rows)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm(stage: int, kind: type[nn.Embedding | nn.EmbeddingBag]) -> None:
    run_ranks(look_up, 2, stage, kind, True)
    run_ranks(look_up, 1, stage, kind, False)


def test_max_norm_of_other_rows_on_each_rank(stage: int) -> None:
    if stage > 0:  # at stage 0 each rank keeps its own, as under DDP
        with pytest.raises(RanksFailed, match=r"'0\.weight' was changed in place, by a forward"):
            run_ranks(look_up, 2, stage, nn.Embedding, False)
