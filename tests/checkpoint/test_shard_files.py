"""Shards copied, saved and loaded: right where they belong, an error anywhere else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


def make(stage: int, seed: int = 0) -> tuple[Any, nn.Module]:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last), nn.Linear(4, 4))
    return zerocore.shard(copy.deepcopy(plain), stage=stage), plain


def parts_of(state: Any) -> Any:
    """A state of which each rank saves its own part."""
    return tree_map(lambda v: v.own_part() if zerocore.is_sharded(v) else v, state)


def saved_by_all(state: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save(parts_of(state), file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    return [torch.load(io.BytesIO(data)) for data in files]  # weights_only, by default


def save_and_load(stage: int) -> None:
    model, plain = make(stage)
    state = model.state_dict()
    copied = copy.deepcopy(state)
    for key, value in copied.items():
        if stage > 0:
            assert isinstance(value, zerocore.tensor.LocalShard)
            assert value.place == state[key].place
        assert torch.equal(full_of(value), plain.state_dict()[key])
    files = saved_by_all(state)
    own, other = files[dist.get_rank()], files[dist.get_rank() - 1]
    for key, value in own.items() if stage > 0 else ():
        assert isinstance(value, zerocore.tensor.LocalShard) and value.fqn == key
        assert value.global_shape == state[key].global_shape
        assert value.shard_range == state[key].shard_range
        if value.shard_range != (0, value.global_shape.numel()):
            with pytest.raises(RuntimeError, match=f"'{key}'.*one rank.*load_state_dict"):
                value.sum()
    for given in (own, copied):
        again, _ = make(stage, seed=1)
        again.load_state_dict(given)
        full = zerocore.full_state_dict(again, rank0_only=False)
        torch.testing.assert_close(full, dict(plain.state_dict()), rtol=0, atol=0)
    if stage > 0:
        with pytest.raises(ValueError, match=r"'0\.weight'.*elements \d+:\d+.*full_state_dict"):
            model.load_state_dict(other)
    again, _ = make(stage, seed=1)
    again.load_state_dict(plain.state_dict())  # full values, on every rank
    full = zerocore.full_state_dict(again, rank0_only=False)
    torch.testing.assert_close(full, dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_save_and_load(stage: int, world_size: int) -> None:
    run_ranks(save_and_load, world_size, stage)


def save_elsewhere(stage: int) -> None:
    model, _ = make(stage)
    safetensors = pytest.importorskip("safetensors.torch")
    if stage == 0:  # as of a plain model
        values = {name: value.contiguous() for name, value in model.state_dict().items()}
        assert safetensors.load(safetensors.save(values)).keys() == values.keys()
        return
    with pytest.raises(TypeError, match=r"zerocore\.full_state_dict"):
        safetensors.save(dict(model.state_dict()))


def test_other_formats(stage: int) -> None:
    run_ranks(save_elsewhere, 2, stage)
