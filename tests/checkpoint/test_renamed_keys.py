"""Checkpoints of a model whose parts had other names, and safetensors' own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.fsdp import fully_shard


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.old = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.old(self.a(x).relu())


class After(Before):
    """Its hook takes what the model had before, as programs do that rename a part."""

    def __init__(self) -> None:
        super().__init__()
        self.new = self.old
        del self.old
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[f"{prefix}new.{key.removeprefix(f'{prefix}old.')}"] = state.pop(key)

    def forward(self, x: Tensor) -> Tensor:
        return self.new(self.a(x).relu())


def full_values(model: nn.Module) -> dict[str, Tensor]:
    values = model.state_dict().items()
    if any(isinstance(value, DTensor) for _, value in values):
        return {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in values}
    return dict(zerocore.full_state_dict(model, rank0_only=False))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(torch.full((4, 8), 0.1 * step) + torch.eye(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: nn.Module, stage: int | None) -> Any:
    """By rows where there is no stage."""
    if stage is None:
        return fully_shard(model)
    return zerocore.shard(model, stage=stage, units=[nn.Linear])


def load_under_new_names(stage: int | None, folder: Path) -> None:
    torch.manual_seed(0)
    before = shard(Before(), stage)
    optimizer = torch.optim.AdamW(before.parameters(), lr=0.1)
    train(before, optimizer, 2)
    zerocore.Checkpoints(folder, before, optimizer).save(1).wait()
    train(before, optimizer, 2)
    after = shard(After(), stage)
    loaded = torch.optim.AdamW(after.parameters(), lr=0.1)
    assert zerocore.Checkpoints(folder, after, loaded).load() == 1
    train(after, loaded, 2)
    found, expected = full_values(after), full_values(before)
    renamed = {key.replace("old.", "new."): value for key, value in expected.items()}
    torch.testing.assert_close(found, renamed, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoints_go_by_hooks_that_rename(stage: int, world_size: int, tmp_path: Path) -> None:
    run_ranks(load_under_new_names, world_size, stage, tmp_path)


@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoints_by_rows_go_by_hooks_that_rename(world_size: int, tmp_path: Path) -> None:
    run_ranks(load_under_new_names, world_size, None, tmp_path)


def load_by_safetensors(stage: int, path: Path) -> None:
    torch.manual_seed(0)
    plain = Before()
    if dist.get_rank() == 0:
        save_model(plain, path)
    dist.barrier()
    torch.manual_seed(1)
    model = zerocore.shard(Before(), stage=stage, units=[nn.Linear])
    if stage > 0:
        with pytest.raises(TypeError, match=r"zerocore\.load_safetensors and"):
            load_model(model, path)
        zerocore.load_safetensors(model, path)
    else:
        load_model(model, path)
    found = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(dict(found), dict(plain.state_dict()), rtol=0, atol=0)


def test_safetensors_own_loader(stage: int, tmp_path: Path) -> None:
    run_ranks(load_by_safetensors, 2, stage, tmp_path / "model.safetensors")
