"""Parameters and modules that cannot be sharded rightly are refused by name on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.sharding.test_errors import still_works


def shard_odd_kinds() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distributed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    distributed[1].weight = nn.Parameter(weight)
    complex_layer = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    narrow = nn.Sequential(nn.Linear(2, 2).to(torch.float8_e4m3fn))
    for stage in range(4):
        for model, named in (
            (distributed, "parameter '1.weight' is a DTensor"),
            (
                nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
                "'0' is an Embedding with max",
            ),
            (nn.Sequential(nn.EmbeddingBag(4, 4, max_norm=2.0)), "'0' is an EmbeddingBag with max"),
            (complex_layer, "parameter '0.weight' of dtype torch.complex64"),
            (narrow, "parameter '0.weight' of dtype torch.float8_e4m3fn"),
        ):
            with pytest.raises(ValueError, match=named):
                zerocore.shard(model, stage=stage)
    still_works(3)


def test_kinds_that_are_refused() -> None:
    run_ranks(shard_odd_kinds, 2)


def test_max_norm_on_one_rank_is_fine() -> None:
    model = zerocore.shard(nn.Sequential(nn.Embedding(4, 4, max_norm=0.5)))
    assert model(torch.arange(4)).norm(dim=1).max() < 0.51
