"""A chain of equal blocks, and a step of it whose events are recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zerocore

WIDTH = 16


class Chain(nn.Module):
    """Equal blocks and nothing else."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[zerocore.reporting.Event]:
    """One step; what it did."""
    with zerocore.reporting.record_events(model) as events:
        model(torch.randn(3, WIDTH)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return events
