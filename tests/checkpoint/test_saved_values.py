"""Values that ``Checkpoints.save`` takes are loaded as they were; others are refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


class Pair(NamedTuple):
    a: int
    b: int


VALUES: list[Callable[[random.Random], Any]] = [
    lambda r: r.randrange(-(10**20), 10**20),
    lambda r: r.random(),
    lambda r: float("inf"),
    lambda r: "é\n" * r.randrange(3),
    lambda r: b"\0bytes",
    lambda r: None,
    lambda r: r.random() < 0.5,
    lambda r: complex(r.random(), 1.0),
    lambda r: torch.arange(r.randrange(4)) + 0.5,
    lambda r: torch.randn(2, 3, dtype=torch.bfloat16).t(),
    lambda r: torch.tensor(r.random()),
    lambda r: torch.Size([1, 2]),
    lambda r: torch.float16,
    lambda r: torch.device("cpu"),
    lambda r: np.float64(r.random()),
    lambda r: np.int32(7),
    lambda r: np.bool_(True),
    lambda r: np.interp(0.5, [0, 1], [0, 1]),
    lambda r: collections.OrderedDict(a=1, b=2),
    lambda r: collections.Counter("abca"),
    lambda r: np.arange(3),
    lambda r: collections.deque([1, 2], 3),
    lambda r: collections.defaultdict(int, a=1),
    lambda r: datetime.datetime(2026, 1, 1),
    lambda r: datetime.timedelta(1),
    lambda r: pathlib.Path("a/b"),
    lambda r: Colour.RED,
    lambda r: Point(),
    lambda r: Pair(1, 2),
    lambda r: range(3),
    lambda r: {1, 2},
    lambda r: frozenset([1]),
    lambda r: bytearray(b"ab"),
    lambda r: decimal.Decimal("0.1"),
    lambda r: fractions.Fraction(1, 3),
    lambda r: uuid.UUID(int=1),
    lambda r: slice(1, 2),
    lambda r: random.Random(1),
    lambda r: len,
    lambda r: np.datetime64("2026-01-01"),
    lambda r: torch.eye(2).to_sparse(),
    lambda r: nn.Parameter(torch.ones(2)),
    lambda r: torch.Generator(),
    lambda r: nn.Linear(1, 1),
    lambda r: iter([1]),
]


def drawn(rng: random.Random, depth: int = 0) -> Any:
    if depth < 3 and rng.random() < 0.4:
        items = [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
        kind = rng.choice(["list", "tuple", "dict"])
        keys: list[Any] = ["a", 1, 0.5, (1, "b"), None, True, "lr"]
        rng.shuffle(keys)
        made = {"list": items, "tuple": tuple(items), "dict": dict(zip(keys, items, strict=False))}
        return made[kind]
    return rng.choice(VALUES)(rng)


class Object:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"value": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["value"]


def assert_same(found: Any, value: Any) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    assert type(found) is type(value), (found, value)
    if isinstance(value, Tensor):
        assert found.dtype == value.dtype and torch.equal(found.to_dense(), value.to_dense())
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key in value:
            assert_same(found[key], value[key])
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for item, expected in zip(found, value, strict=True):
            assert_same(item, expected)
    else:
        assert found == value


def save_and_load(folder: Path, seeds: range) -> tuple[int, int]:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Linear(3, 2), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taken = 0
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        value, option = (drawn(rng), drawn(rng)) if seed % 2 else (drawn(rng), 1)
        optimizer.param_groups[0]["option"] = option
        place = folder / str(seed)
        try:
            checkpoints = zerocore.Checkpoints(
                place, model, optimizer, stateful={"thing": Object(value)}
            )
            checkpoints.save(1).wait()
        except TypeError as error:
            assert "thing.state_dict()" in str(error) or "option 'option'" in str(error)
            continue
        taken += 1
        thing = Object(None)
        fresh = torch.optim.SGD(model.parameters(), 0.1)
        zerocore.Checkpoints(place, model, fresh, stateful={"thing": thing}).load()
        assert_same(thing.state, value)
        assert_same(fresh.param_groups[0]["option"], option)
    return taken, len(seeds) - taken


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.nightly)])
def test_random_values(count: int, tmp_path: Path) -> None:
    for taken, refused in run_ranks(save_and_load, 2, tmp_path, range(count), timeout=300.0):
        assert taken > count // 8 and refused > count // 8


def rates(folder: Path) -> None:
    given: list[Any] = [np.float64(0.1), torch.tensor(0.1)]
    for number, rate in enumerate(given):
        model = zerocore.shard(nn.Linear(3, 2), stage=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.param_groups[0]["lr"] = rate
        zerocore.Checkpoints(folder / str(number), model, optimizer).save(1).wait()
        fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zerocore.Checkpoints(folder / str(number), model, fresh).load()
        assert float(fresh.param_groups[0]["lr"]) == float(rate)
        assert isinstance(fresh.param_groups[0]["lr"], Tensor) == isinstance(rate, Tensor)


def test_rates_of_numpy_and_tensors(tmp_path: Path) -> None:
    run_ranks(rates, 2, tmp_path)


class Growing(nn.Linear):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.extra = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return self.extra(super().forward(x))


def freeze_and_grow(folder: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = zerocore.shard(Growing(), stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        models.append((model, optimizer, zerocore.Checkpoints(folder, model, optimizer)))
    (model, optimizer, checkpoints), (again, fresh, others) = models
    for step in range(4):
        model.extra.requires_grad_(step < 2)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        checkpoints.save(4).wait()
    again.extra.requires_grad_(False)
    with torch.inference_mode():
        assert others.load() == 4
    dist.barrier()
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    found = zerocore.full_optimizer_state_dict(fresh, rank0_only=False)["state"]
    torch.testing.assert_close(found, states, rtol=0, atol=0)
    assert torch.equal(again.seen, model.seen) and len(again.seen) == 4
    again(torch.ones(2, 4)).sum().backward()


def test_parameters_frozen_later_and_buffers_that_grow(tmp_path: Path) -> None:
    run_ranks(freeze_and_grow, 2, tmp_path)


class Averages:
    """Keeps an average of each parameter, as shards or in full."""

    def __init__(self, model: nn.Module, full: bool) -> None:
        self.full = full
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        if not self.full:
            return {"nested": [self.values]}
        return {n: v.full_tensor() for n, v in self.values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def save_averages(folder: Path, stage: int, full: bool) -> None:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Linear(3, 5), stage=stage)
    averages = Averages(model, full)
    checkpoints = zerocore.Checkpoints(folder, model, stateful={"ema": averages})
    checkpoints.save(1).wait()


def load_averages(folder: Path, stage: int, wrong: str) -> None:
    model = zerocore.shard(nn.Linear(3, 5), stage=stage)
    averages = Averages(model, True)
    checkpoints = zerocore.Checkpoints(folder, model, stateful={"ema": averages})
    if wrong:
        with pytest.raises(ValueError, match=wrong):
            checkpoints.load()
        assert not hasattr(averages, "loaded")
    else:
        checkpoints.load()
        assert averages.loaded


class OtherModel:
    """Another sharded model, whose parameters have the same names."""

    def __init__(self, stage: int) -> None:
        self.model = zerocore.shard(nn.Linear(4, 7), stage=stage)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def with_another_model(folder: Path, stage: int) -> None:
    other = OtherModel(stage)
    model = zerocore.shard(nn.Linear(3, 5), stage=stage)
    checkpoints = zerocore.Checkpoints(folder, model, stateful={"teacher": other})
    checkpoints.save(1).wait()
    before = full_of(other.model.weight)
    with torch.no_grad():
        other.model.weight.zero_()
    checkpoints.load()
    assert torch.equal(full_of(other.model.weight), before)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_shards_of_another_model_in_an_object(stage: int, tmp_path: Path) -> None:
    run_ranks(with_another_model, 2, tmp_path, stage)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_in_objects_load_where_they_are_this_ranks(ranks: int, tmp_path: Path) -> None:
    for full in (False, True):
        folder = tmp_path / str(full)
        run_ranks(save_averages, 2, folder, 3, full)
        wrong = "'ema' holds one rank's part of '(weight|bias)', .* saved on 2 ranks.*full_tensor"
        run_ranks(load_averages, ranks, folder, 3, wrong if ranks > 2 and not full else "")
        run_ranks(load_averages, ranks, folder, 1, wrong if ranks > 2 and not full else "")
    run_ranks(save_averages, 2, tmp_path / "whole", 0, False)  # each rank's part is all
    run_ranks(load_averages, ranks, tmp_path / "whole", 0, "")
