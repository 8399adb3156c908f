"""Modules of a sharded model keep their classes, of whatever kind these are."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks


class Meta(type):
    """Its classes cannot be made without a keyword."""

    def __new__(cls, name: str, bases: Any, namespace: Any, *, kind: str) -> Any:
        return super().__new__(cls, name, bases, namespace)

    def __init__(cls, name: str, bases: Any, namespace: Any, *, kind: str) -> None:
        super().__init__(name, bases, namespace)


class WithMeta(nn.Linear, metaclass=Meta, kind="layer"):
    pass


class Registered(nn.Linear):
    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()


class WithKey(Registered, key="layer"):
    pass


class Doubles(nn.Linear):
    """Has a call of its own, as transformers' layers with checkpoints."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Quadruples(Doubles):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Inherits(Quadruples):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = (nn.Linear, WithMeta, WithKey, Doubles, Quadruples, Inherits)
        self.layers = nn.Sequential(*(kind(4, 4) for kind in kinds))
        self.norm = nn.BatchNorm1d(4)
        self.act = torch.jit.script(nn.Hardtanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.layers(x)))


def init_weights(module: nn.Module) -> None:
    """As torch documents `Module.apply`."""
    if type(module) is nn.Linear or type(module) in {WithMeta, WithKey, Doubles}:
        nn.init.xavier_uniform_(module.weight)
        module.bias.data.fill_(0.01)
    if type(module) in {nn.BatchNorm1d}:
        module.eval()


def train(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda model: None,
    "compiled layers": lambda model: [m.compile(backend="eager") for m in model.layers],
    "compiled": lambda model: model.compile(backend="eager"),
}


def use(stage: int) -> None:
    units = [nn.Linear, nn.BatchNorm1d]
    for before in (True, False):
        for name, change in CHANGES.items():
            plain, model = Net(), Net()
            if before:
                change(model)
            zerocore.shard(model, stage=stage, units=units)
            if not before:
                change(model)
            assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
            for each in (plain, model):
                torch.manual_seed(1)
                each.apply(init_weights)
            torch.testing.assert_close(train(model), train(plain), msg=f"{name}, {before}")
            found = zerocore.full_state_dict(model, rank0_only=False)
            torch.testing.assert_close(found, plain.state_dict(), msg=f"{name}, {before}")


def test_modules_keep_their_classes(stage: int) -> None:
    run_ranks(use, 2, stage)


def copies() -> None:
    model: Any = zerocore.shard(Net(), units=[nn.Linear])
    for module in (model, *model.layers):
        for function in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="is sharded and cannot be pickled"):
                function(module)
    other = Inherits(4, 4)
    x = torch.ones(1, 4)
    right = 4 * nn.functional.linear(x, other.weight, other.bias)
    torch.testing.assert_close(other(x), right)
    torch.testing.assert_close(torch.compile(other, backend="eager", fullgraph=True)(x), right)
    assert type(copy.deepcopy(other)) is Inherits
    gone = ref(model)
    gc.collect()
    gc.disable()
    del model, module
    assert gone() is None  # at once
    gc.enable()


def test_copies_and_others_of_the_class() -> None:
    run_ranks(copies, 2)


def script() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"'1' is a TorchScript module.*plain nn\.Module"):
        zerocore.shard(model)
    assert type(model[0]) is nn.Linear


def test_a_scripted_child_is_refused() -> None:
    run_ranks(script, 2)
