"""A save asks no other rank while training waits, and uses what the one before has planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.checkpoint.saved_nets import assert_equal, full_states
from tests.distributed.harness import run_ranks
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.save_plan import SavePlan


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32)))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def count_metadata() -> list[SavePlan]:
    """Notes the plan of each save that makes new metadata."""
    original, made = SavePlan.metadata, []

    def metadata(plan: SavePlan, values: Any, paths: Any) -> Any:
        made.append(plan)
        return original(plan, values, paths)

    SavePlan.metadata = metadata  # type: ignore[method-assign]
    return made


def save_alike(folder: Path) -> None:
    model, optimizer = training()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=None)
    made, plans = count_metadata(), []
    for index in (1, 2, 3):
        checkpoints.save(index).wait()
        plans.append(checkpoints._kept._plan)
        step(model, optimizer)
    assert plans[0] is plans[1] is plans[2] and len(made) == (dist.get_rank() == 0)
    metadata = [Contents(folder / f"step-0000000{index}").metadata for index in (1, 2, 3)]
    for found in metadata:
        assert found.state_dict_metadata == metadata[0].state_dict_metadata
        assert found.storage_data == metadata[0].storage_data
    optimizer.param_groups[0]["note"] = "longer values move no tensor"
    checkpoints.save(4).wait()
    assert checkpoints._kept._plan is plans[0] and len(made) == 2 * (dist.get_rank() == 0)
    moved = Contents(folder / "step-00000004").metadata.storage_data
    assert all(moved[index] == info for index, info in found.storage_data.items() if index.offset)
    expected = full_states(model, optimizer)
    step(model, optimizer)
    checkpoints.load()
    assert_equal(full_states(model, optimizer), expected)
    checkpoints.load(2)


class Source:
    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ValueError("the source is closed")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def save_apart(folder: Path) -> None:
    model, optimizer = training()
    source, store = Source(), dist.distributed_c10d._get_default_store()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, stateful={"source": source})
    if dist.get_rank() == 1:
        store.wait(["rank 0 has saved"])
    pending = checkpoints.save(1)
    store.set("rank 0 has saved", "")
    pending.wait()
    source.fails = dist.get_rank() == 1
    if source.fails:
        with pytest.raises(ValueError, match="the source is closed"):
            checkpoints.save(2)
    else:
        checkpoints.save(2)
        with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: the source is closed"):
            checkpoints.wait()
    source.fails = False
    step(model, optimizer)
    checkpoints.save(3).wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_save_like_the_one_before_plans_nothing(tmp_path: Path) -> None:
    run_ranks(save_alike, 2, tmp_path, timeout=60.0)


def test_no_rank_waits_for_another_one_in_save(tmp_path: Path) -> None:
    run_ranks(save_apart, 2, tmp_path, timeout=60.0)
