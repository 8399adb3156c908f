"""Trains ranks on the device, and the same ranks on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.async_device.device import DEVICE, init_process_group, load

WIDTH = 32


def start(on_device: bool) -> tuple[torch.device, Any]:
    """Joins the ranks; returns the rank's device and, unless it is the CPU, its extension."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    if on_device:
        extension = load()
        init_process_group(rank, world_size, store)
        return torch.device(DEVICE, 0), extension
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    return torch.device("cpu"), None


def in_turns(extension: Any, count: int) -> Iterator[int]:
    """Yields seeds; in all turns but the first the device's streams are late, by the seed."""
    for seed in range(count):
        if extension is not None:
            extension.set_delays(seed, 0.3 if seed else 0.0, 400)
        yield seed


class Block(nn.Module):
    """A unit: two layers, so that a backward has several gradients to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).tanh())
        return x + hidden


def make_model(device: torch.device, num_blocks: int = 4) -> nn.Sequential:
    """Makes a model with the same weights on each rank and device."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks))).to(device)


def train(
    model: nn.Module,
    device: torch.device,
    steps: int = 3,
    lr: float = 1e-2,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[torch.Tensor]:
    """Trains on this rank's own data; returns the losses, on the device, without a wait."""
    optimizer = make_optimizer(model.parameters(), lr=lr)
    losses = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(1000 * step + rank)
        x = torch.randn(4, WIDTH, generator=generator, device=device)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_sharded(device: torch.device, stage: int, prefetch: int = 1) -> list[float]:
    """Trains some steps at a stage and returns the losses.

    On the device `prefetch + 1` reductions are in flight at a time, on the CPU one.
    """
    on_device = device.type != "cpu"
    communication = zerocore.Communication(
        prefetch=prefetch,
        reductions_in_flight=prefetch + 1 if on_device else 1,
    )
    model = zerocore.shard(
        make_model(device), stage=stage, units=[Block], communication=communication
    )
    return torch.stack(train(model, device)).tolist()


def train_offloaded(
    device: torch.device, stage: int, offload: zerocore.Offload, **options: Any
) -> list[float]:
    """Trains with states on the host, which the host updates, and returns the losses."""
    model = zerocore.shard(
        make_model(device), stage=stage, units=[Block], offload=offload, **options
    )
    losses = train(model, device, make_optimizer=zerocore.optim.AdamW)
    return torch.stack(losses).tolist()
