"""The benchmarks' model in files: it trains as the same model in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerocore
from bench.offload.training import OPTIONS, SwappedModel, gpt, loss_of


def test_a_model_in_files_trains_as_in_memory(tmp_path: Path) -> None:
    """The same bits of each loss; six units, of which three are in memory at a time."""
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    swapped = SwappedModel(tmp_path, lambda: gpt(4, 32, 4, 50))
    assert list(tmp_path.iterdir()) == []
    torch.manual_seed(1)
    model = nn.Sequential(*gpt(4, 32, 4, 50))
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = zerocore.optim.AdamW(model.parameters(), OPTIONS["lr"], betas=betas)
    for _ in range(5):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(swapped.step(tokens), loss.detach())
