"""Plain values come back as they were saved, and elements in another order in memory do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerocore
from tests.checkpoint.saved_nets import assert_equal, full_states
from tests.distributed.harness import run_ranks


class Counted(nn.Linear):
    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class CountingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


def load_plain_values(folder: Path, calls: int) -> None:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Sequential(Counted(4, 6), nn.Linear(6, 2)), stage=3)
    optimizer = CountingSGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    loaded = checkpoints.load()
    assert model[0].calls == calls and loaded == (5 if calls else None)
    if loaded is None:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        model[0].calls = 5
        checkpoints.save(5).wait()
    assert {state["steps"] for state in optimizer.state.values()} == {3}


def test_plain_values_of_modules_and_optimizers(tmp_path: Path) -> None:
    for world_size, calls in ((2, 0), (2, 5), (3, 5)):
        run_ranks(load_plain_values, world_size, tmp_path, calls)


def conv(memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zerocore.shard(nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=memory_format)))
    return model, torch.optim.AdamW(model.parameters())


def load_another_order(folder: Path) -> None:
    first, optimizer = conv(torch.channels_last)
    first(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    zerocore.Checkpoints(folder, first, optimizer).save(1).wait()
    second, loaded = conv(torch.contiguous_format)
    zerocore.Checkpoints(folder, second, loaded).load()
    assert_equal(full_states(second, loaded), full_states(first, optimizer))


def test_elements_in_another_order_in_memory(tmp_path: Path) -> None:
    run_ranks(load_another_order, 1, tmp_path)
