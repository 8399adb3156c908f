"""Small blocks that `shard` finds are one unit: as many messages as that has, the same training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.programs.models import Net
from tests.distributed.training import (
    Trained,
    assert_same_training,
    case_named,
    train_reference,
    train_sharded,
)
from tests.model.joined import joined
from tests.zoo import CASES
from zerocore.model.units import choose_units

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
NAMES = [name for name, case in CASES.items() if case.units is None]


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


@pytest.mark.parametrize("world_size", [*by_night(1, 2, 4), 3])
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
            with zerocore.reporting.record_events(model) as events:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        moved = [
            (event.op, event.unit, event.nbytes) for event in events if event.op in COLLECTIVES
        ]
        assert moved == zerocore.planning.predict_events(model)
        assert zerocore.memory_usage(model, optimizer) == zerocore.planning.predict_memory(model)
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


@pytest.mark.parametrize("world_size", [*by_night(2), 3])
def test_checkpoints_go_from_one_to_the_other(world_size: int, tmp_path: Path) -> None:
    run_ranks(load_into_other_units, world_size, tmp_path, timeout=120)


def wrap(system: str, model: nn.Module, stage: int) -> nn.Module:
    if system == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if system == "fsdp2":
        return fully_shard(model)
    with joined():
        return zerocore.shard(model, stage=stage)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    if zerocore.is_sharded(model):
        return zerocore.full_state_dict(model, rank0_only=False)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    copy = {name: value.clone() for name, value in state.items()}
    found = [copy] if dist.get_rank() == 0 else [None]  # FSDP2 gives it to one rank
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


class Dropping(Net):
    """Leaves out a block that its caller names."""

    def forward(self, x: Tensor, dropped: int = -1) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = x if index == dropped else block(x)
        return self.out(self.norm(x))


def batch(step: int) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def drop_and_evaluate(system: str, stage: int) -> dict[str, Tensor]:
    """Layer drop, with an evaluation of the whole model behind each step."""
    torch.manual_seed(0)
    model = wrap(system, Dropping(4), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for step in range(5):
        model(batch(step), step % 5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs.append(model(batch(-step - 1)))
        model.train()
    return full_state(model) | {"outputs": torch.stack(outputs)}


def load_and_freeze(system: str, stage: int) -> dict[str, Tensor]:
    """Goes on from a state in a new model, of which some blocks are frozen, by micro-batches."""
    torch.manual_seed(0)
    model = wrap(system, Net(4), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    plain = Net(4)
    plain.load_state_dict(full_state(model))
    plain.blocks[:2].requires_grad_(False)
    model = wrap(system, plain, stage)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(1, 4):
        for part in batch(step).chunk(2):
            (model(part).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


class WithSide(nn.Module):
    """One unit of three layers, one of which is called where its caller asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(8, 12), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + (self.side(hidden) if side else 0)


def evaluate_before_the_backward(system: str, stage: int) -> dict[str, Tensor]:
    """Each rank evaluates in its own way, also with a layer that others leave out."""
    torch.manual_seed(0)
    model = wrap(system, WithSide(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for step in range(4):
        loss = model(batch(step)).square().mean()
        with torch.no_grad():
            outputs.append(model(batch(-step - 1), side=dist.get_rank() == step % 2))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model) | {"outputs": torch.stack(outputs)}


def evaluate_between_micro_batches(system: str, stage: int) -> dict[str, Tensor]:
    """Two forwards, an evaluation behind each, and one backward; a new model goes on."""
    torch.manual_seed(0)
    model = wrap(system, WithSide(), stage)
    outputs = []
    for step in range(4):
        if step == 2:
            plain = WithSide()
            plain.load_state_dict(full_state(model))
            model = wrap(system, plain, stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for part in batch(step).chunk(2):
            losses.append(model(part).square().mean())
            with torch.inference_mode():
                outputs.append(model(part, side=dist.get_rank() != step % 2).clone())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model) | {"outputs": torch.stack(outputs)}


def compare(script: Callable[[str, int], dict[str, Tensor]], stage: int) -> None:
    expected = script("ddp", stage)
    for system in ("fsdp2", "zerocore"):
        torch.testing.assert_close(script(system, stage), expected)


SCRIPTS = [
    drop_and_evaluate,
    load_and_freeze,
    evaluate_before_the_backward,
    evaluate_between_micro_batches,
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_as_with_ddp_and_fsdp2(
    script: Callable[[str, int], dict[str, Tensor]], stage: int
) -> None:
    run_ranks(compare, 2, script, stage)
