"""Models with and without offload, and what tests of it compare."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore import MixedPrecision, Offload

Optimizer = torch.optim.Optimizer
STATES = Offload(states="cpu")
GRADIENTS = Offload(states="device", gradients="cpu")
BOTH = Offload(states="cpu", gradients="cpu")
ALL = Offload(states="cpu", gradients="cpu", parameters="cpu")
PARAMETERS = Offload(states="cpu", parameters="cpu")
FOLDER = tempfile.gettempdir()
DISK = Offload(states="disk", path=FOLDER)
DISK_BOTH = Offload(states="disk", gradients="cpu", path=FOLDER)
ALL_ON_DISK = Offload(states="disk", gradients="cpu", parameters="disk", path=FOLDER)
STATES_ON_DISK = Offload(states="disk", parameters="cpu", path=FOLDER)
PARAMETERS_ON_DISK = Offload(states="cpu", parameters="disk", path=FOLDER)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def adamw(params: Iterable[Any], **options: Any) -> Optimizer:
    return zerocore.optim.AdamW(params, lr=3e-3, eps=1e-5, weight_decay=0.1, **options)


def grouped(params: Iterable[Any]) -> Optimizer:
    """A group without weight decay, and clipping."""
    held = list(params)
    groups = [
        {"params": [p for p in held if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
    ]
    return zerocore.optim.AdamW(groups, lr=3e-3, eps=1e-5, clip_grad_norm=0.5)


def torchs(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, eps=1e-5, weight_decay=0.1)


def assert_same_bits(ours: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), f"{what}: {key} differs"


def offloads_of(stage: int) -> list[Offload]:
    offloads = [STATES]
    if stage >= 2:
        offloads += [GRADIENTS, BOTH]
    return offloads + ([PARAMETERS, ALL] if stage == 3 else [])


def disks_of(stage: int) -> list[Offload]:
    offloads = [DISK] if stage < 2 else [DISK, DISK_BOTH]
    return offloads + ([ALL_ON_DISK, STATES_ON_DISK, PARAMETERS_ON_DISK] if stage == 3 else [])


def disk_files() -> list[int]:
    """Descriptors of this process that are files of states; the first reads and writes."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "states-of-rank-" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
        except OSError:  # the folder's own
            pass
    return sorted(found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).tanh())
        return x + hidden


def blocks(stage: int, offload: Offload | None, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model = zerocore.shard(model, stage=stage, units=[Block], offload=offload, **options)
    return model, adamw(model.parameters(), clip_grad_norm=1.0)


def backward(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 64).view(4, 16) * (1 + dist.get_rank())
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()
