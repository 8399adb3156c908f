"""Under ``torch.set_default_device`` a model trains, is saved and loaded as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks


def train(folder: Path, stage: int, default: str) -> dict[str, torch.Tensor]:
    """Three clipped steps, a checkpoint after the first. On "meta" no tensor has values."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))
    inputs = torch.linspace(-1, 1, 36, device="cpu").view(4, 9)
    torch.set_default_device(default)
    try:
        zerocore.shard(model, stage=stage)
        optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
        saved = zerocore.Checkpoints(folder / default, model, optimizer)
        for step in range(3):
            model(inputs).square().mean().backward()
            zerocore.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                saved.save(1)
        saved.wait()
        full = dict(zerocore.full_state_dict(model, rank0_only=False))
        assert saved.load() == 1
        loaded = dict(zerocore.full_state_dict(model, rank0_only=False))
        return full | {f"loaded {name}": value for name, value in loaded.items()}
    finally:
        torch.set_default_device("cpu")


def compare(folder: Path, stage: int) -> None:
    expected = train(folder, stage, "cpu")
    found = train(folder, stage, "meta")
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", [0, 3])
def test_training_and_checkpoints(stage: int, tmp_path: Path) -> None:
    run_ranks(compare, 2, tmp_path, stage)
