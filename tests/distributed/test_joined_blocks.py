"""Small blocks that `shard` finds are one unit: as many messages as that has, the same training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    Trained,
    assert_same_training,
    case_named,
    train_reference,
    train_sharded,
)
from tests.zoo import CASES
from zerocore.model import units
from zerocore.model.units import choose_units

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
NAMES = [name for name, case in CASES.items() if case.units is None]


@contextmanager
def joined(nbytes: int = 1 << 20) -> Iterator[None]:
    """As in programs; tests have a unit for each block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "JOINED_NBYTES", nbytes)
        yield


def chain(depth: int = 6, width: int = 8) -> nn.Sequential:
    """An input layer, blocks of 4 (width + 1) width bytes, and an output layer."""
    blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
    return nn.Sequential(nn.Linear(3, width), nn.Sequential(*blocks), nn.Linear(width, 1))


def names_of(model: nn.Module, chosen: list[str] | None = None) -> list[str]:
    return [unit.name for unit in choose_units(model, chosen)]


def test_blocks_that_are_small_together_are_a_unit() -> None:
    model = chain()
    with joined():
        assert names_of(model) == ["0", "1.0 to 1.5", "2"]
        each = [f"1.{i}" for i in range(6)]
        assert names_of(model, each) == ["0", *each, "2"], "what was named is a unit"
    with joined(2 * 4 * 9 * 8):
        assert names_of(model) == ["0", "1.0 to 1.1", "1.2 to 1.3", "1.4 to 1.5", "2"]
    with joined(2 * 4 * 9 * 8 - 1):
        assert names_of(model) == ["0", *each, "2"]


def train_joined(
    names: list[str], stages: list[int]
) -> dict[str, tuple[Trained | None, list[Trained]]]:
    found = {}
    with joined():
        for name in names:
            case = case_named(name)
            is_first = dist.get_rank() == 0
            reference = train_reference(case, dist.get_world_size()) if is_first else None
            found[name] = reference, [train_sharded(case, stage) for stage in stages]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_they_train_as_in_one_process(world_size: int) -> None:
    names = NAMES[world_size % 3 :: 3]
    answers = run_ranks(train_joined, world_size, names, [world_size % 3, 3], timeout=240)
    for name in names:
        reference = answers[0][name][0]
        assert reference is not None
        for ranks in zip(*(answer[name][1] for answer in answers), strict=True):
            assert_same_training(list(ranks), reference)


def count_collectives(stage: int) -> list[int]:
    """Of a step, with a unit for each block and with one for all of them."""
    counts = []
    for nbytes in (0, 1 << 20):
        with joined(nbytes):
            model = zerocore.shard(chain(), stage=stage)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            with zerocore.record_events(model) as events:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        moved = [
            (event.op, event.unit, event.nbytes) for event in events if event.op in COLLECTIVES
        ]
        assert moved == zerocore.predict_events(model)
        assert zerocore.memory_usage(model, optimizer) == zerocore.predict_memory(model)
        counts.append(len(moved))
    return counts


def test_they_take_the_messages_of_one_unit(stage: int) -> None:
    for apart, together in run_ranks(count_collectives, 2, stage):
        assert apart - together == 5 * {0: 1, 1: 2, 2: 2, 3: 3}[stage]


def load_into_other_units(folder: Path) -> None:
    """A checkpoint of one choice of units goes on with the other one's."""
    for stage, first in itertools.product((0, 1, 2, 3), (0, 1 << 20)):
        losses = []
        for nbytes in (first, first ^ 1 << 20):
            torch.manual_seed(0)
            with joined(nbytes):
                model = zerocore.shard(chain(), stage=stage)
            optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.1)
            checkpoints = zerocore.Checkpoints(folder / f"{stage}-{first}", model, optimizer)
            if checkpoints.load() is None:
                train(model, optimizer)
                checkpoints.save(1).wait()
            losses.append(train(model, optimizer))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # three ranks add in other orders


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(3):
        loss = model(torch.full((2, 3), dist.get_rank() + step + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpoints_go_from_one_to_the_other(world_size: int, tmp_path: Path) -> None:
    run_ranks(load_into_other_units, world_size, tmp_path, timeout=120)
