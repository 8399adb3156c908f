"""Parameters without elements, and outputs that contain themselves or are nested without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
import zerocore.fsdp
from tests.by_night import stage_3_by_day
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


class Empty(nn.Module):
    """The root's own parameters have no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.none = nn.Parameter(torch.empty(0))
        self.flat = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.none.sum() + self.flat.sum(0)


def train_empty(stage: int | str) -> None:
    plain, model = Empty(), Empty()
    if stage == "fsdp":
        for module in (*model.layers, model):
            zerocore.fsdp.fully_shard(module)
    else:
        zerocore.shard(model, stage=stage, units=[nn.Linear])
    x = torch.ones(2, 4)
    for net in (plain, model):
        net(x).square().sum().backward()
    if stage == "fsdp":
        model.unshard()
        model.reshard()
    else:
        with zerocore.unsharded(model):
            assert model.none.shape == (0,) and model.flat.shape == (0, 4)
            torch.testing.assert_close(model(x), plain(x))
    for own, right in zip(model.parameters(), plain.parameters(), strict=True):
        grad = None if own.grad is None else full_of(own.grad)
        torch.testing.assert_close(grad, right.grad)


@pytest.mark.parametrize("stage", [0, 2, 3, "fsdp"])
def test_parameters_without_elements(stage: int | str) -> None:
    run_ranks(train_empty, 2, stage)
    run_ranks(train_empty, 3, stage)


@dataclass
class Outputs:
    value: Any = None
    itself: Any = None


@dataclass(slots=True)
class Slotted:
    value: Any = None
    itself: Any = None


class Endless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, kind: str) -> Any:
        y = self.layers[1](torch.tanh(self.layers[0](x)))
        if kind == "deep":
            for _ in range(100_000):
                y = [y]
            return y
        made: Any = Slotted(y) if kind == "slots" else Outputs(y)
        if kind == "dict":
            made = {"value": y}
            made["itself"] = made
        elif kind == "list":
            made = [y]
            made.append((made, made))
        else:
            made.itself = [made]
        return made


def loss_of(found: Any, kind: str) -> Tensor:
    while kind == "deep" and isinstance(found, list):
        found = found[0]
    found = found["value"] if kind == "dict" else found[0] if kind == "list" else found
    return getattr(found, "value", found).square().sum()


def train_endless(stage: int) -> None:
    plain, model = Endless(), zerocore.shard(Endless(), stage=stage, units=[nn.Linear])
    for kind in ("dict", "list", "dataclass", "slots", "deep"):
        for net in (plain, model):
            net.zero_grad()
            loss_of(net(torch.ones(2, 4), kind), kind).backward()
        for own, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_of(own.grad), right.grad)


@stage_3_by_day
def test_outputs_that_contain_themselves(stage: int) -> None:
    run_ranks(train_endless, 2, stage)
