"""The model that tests of checkpoints save: it has all awkward kinds of parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zerocore

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "zerocore": lambda params: zerocore.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


class AwkwardNet(nn.Module):
    """channels_last, 4-D, 0-D, empty, tied and frozen parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.block = nn.Sequential(nn.Linear(6, 5, dtype=torch.float32), nn.Dropout(0.1))
        self.head = nn.Linear(5, 6)
        self.tied = nn.Linear(5, 6)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.cube = nn.Parameter(torch.randn(3, 2, 5, 7))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.norm(self.conv(x).flatten(1)))
        out: Tensor = self.head(hidden) + self.tied(hidden) * self.scale
        return out + self.cube.mean() + self.frozen.sum() + self.empty.sum()


def make(stage: int | None, seed: int = 0, **options: Any) -> nn.Module:
    """The model, sharded unless the stage is None."""
    torch.manual_seed(seed)
    net = AwkwardNet()
    return net if stage is None else zerocore.shard(net, stage=stage, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps on the same batch on all ranks."""
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        model(torch.randn(4, 4, 3, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(
    stage: int, name: str = "adamw", steps: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer after some steps."""
    model = make(stage, **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Full tensors of model and optimizer on every rank, and the options of its groups."""
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    return {
        "model": zerocore.full_state_dict(model, rank0_only=False),
        "state": {
            f"{name}.{key}": value.clone()
            for name, state in states["state"].items()
            for key, value in state.items()  # type: ignore[union-attr]
        },
        "groups": [{**group} for group in states["param_groups"]],  # type: ignore[dict-item]
    }


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same keys and bits."""
    for part in ("model", "state"):
        assert actual[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            assert actual[part][key].dtype == value.dtype, key
            assert torch.equal(actual[part][key], value), key
    assert actual["groups"] == expected["groups"]


def shared_folder(path: str) -> str:
    """Rank 0's path, on all ranks."""
    paths = [path]
    if dist.is_initialized():
        dist.broadcast_object_list(paths)
    return paths[0]
