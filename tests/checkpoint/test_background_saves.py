"""A save in the background holds the moment of the call, whatever training does meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states
from tests.distributed.harness import run_ranks
from zerocore.checkpoint.commit import files
from zerocore.model.state import state_of

NUMEL = 2048
BUDGET = 16 << 20


def wide(stage: int) -> nn.Module:
    """48 MB of weights and as much again of each moment: larger than the budget."""
    torch.manual_seed(0)
    layers = [nn.Linear(NUMEL, NUMEL, bias=False) for _ in range(3)]
    return zerocore.shard(nn.Sequential(*layers), stage=stage)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, NUMEL)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def hold_writes() -> threading.Event:
    """From now on nothing is written while the event is not set."""
    original, may_write = files.write, threading.Event()

    def write(*args: Any) -> int:
        may_write.wait(60.0)
        return original(*args)

    files.write = write
    return may_write


def save_and_step(folder: Path, stage: int, name: str) -> None:
    model = wide(stage)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, memory_budget=BUDGET)
    may_write = hold_writes()
    expected = full_states(model, optimizer)
    pending = checkpoints.save(1)
    before = pending.stall_seconds
    # The step finds nothing written, and no more copied than the budget has room for.
    state_of(model).readers.insert(0, may_write.set)
    step(model, optimizer)
    assert may_write.is_set() and pending.stall_seconds > before
    step(model, optimizer)
    pending.wait()
    assert pending.held_nbytes <= BUDGET
    assert pending.held_nbytes > 0 or stage == 0  # there, one rank may write all
    changed = full_states(model, optimizer)
    assert not torch.equal(changed["model"]["0.weight"], expected["model"]["0.weight"])
    checkpoints.load()
    assert_equal(full_states(model, optimizer), expected)
    waiting = zerocore.Checkpoints(folder / "waiting", model, optimizer, background=False)
    waiting.save(1)
    step(model, optimizer)
    waiting.load()
    assert_equal(full_states(model, optimizer), expected)


OTHERS = [
    pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, "zerocore"), (0, "adamw"))
]


@pytest.mark.parametrize(("stage", "name"), [*OTHERS, (3, "adamw")])
def test_a_step_in_the_middle_of_a_save(stage: int, name: str, tmp_path: Path) -> None:
    run_ranks(save_and_step, 2, tmp_path, stage, name, timeout=120.0)


def change_otherwise(folder: Path) -> None:
    model = wide(3)
    expected = {name: value.clone() for name, value in zerocore.full_state_dict(model).items()}
    checkpoints = zerocore.Checkpoints(folder, model, memory_budget=BUDGET, keep=None)
    may_write = hold_writes()
    pending = checkpoints.save(1)
    state_of(model).readers.insert(0, may_write.set)
    with zerocore.unsharded(model, write_back=True):
        model[0].weight.data.zero_()  # type: ignore[union-attr,operator]
    pending.wait()
    may_write.clear()
    checkpoints.save(2)
    state_of(model).readers.insert(0, may_write.set)
    model.load_state_dict(model.state_dict())
    checkpoints.wait()
    may_write.clear()
    checkpoints.save(3)
    with torch.no_grad():
        model[1].weight.mul_(2.0)  # type: ignore[union-attr,operator]
    may_write.set()
    with pytest.raises(RuntimeError, match="was changed during a background save"):
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.load(1)
    found = zerocore.full_state_dict(model)
    if dist.get_rank() == 0:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_other_changes_wait_or_are_noticed(tmp_path: Path) -> None:
    run_ranks(change_otherwise, 2, tmp_path, timeout=120.0)


def fail_and_go_on(folder: Path) -> None:
    model = wide(3)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, memory_budget=BUDGET)
    original = files.create

    def create(path: Path) -> int:
        if path.suffix == ".distcp" and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    files.create = create
    pending = checkpoints.save(1)
    step(model, optimizer)  # does not wait for ever
    with pytest.raises((PermissionError, RuntimeError), match="Permission denied"):
        checkpoints.save(2)
    assert pending.done and checkpoints.steps() == []
    files.create = original
    checkpoints.save(3).wait()
    assert checkpoints.steps() == [3]
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_training_goes_on_after_a_failed_save(tmp_path: Path) -> None:
    run_ranks(fail_and_go_on, 2, tmp_path, timeout=120.0)


def load_by_another(folder: Path) -> None:
    """The object and the model that save are gone when the other one looks for checkpoints."""
    model = wide(3)
    may_write = hold_writes()
    zerocore.Checkpoints(folder, model).save(1)
    model = wide(3)
    threading.Timer(0.5, may_write.set).start()
    assert zerocore.Checkpoints(folder, model).load() == 1


def test_a_load_waits_for_saves_of_other_objects(tmp_path: Path) -> None:
    run_ranks(load_by_another, 2, tmp_path)


class Loader:
    """State that one rank cannot tell."""

    broken = True

    def state_dict(self) -> dict[str, int]:
        if self.broken and dist.get_rank() == 1:
            raise ValueError("the loader is closed")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def fail_to_begin(folder: Path) -> None:
    loader = Loader()
    checkpoints = zerocore.Checkpoints(folder, wide(3), stateful={"loader": loader})
    kind, text = (ValueError, "closed") if dist.get_rank() == 1 else (RuntimeError, "rank 1 failed")
    with pytest.raises(kind, match=text):
        checkpoints.save(1)
        checkpoints.wait()
    loader.broken = False
    checkpoints.save(2).wait()
    assert checkpoints.steps() == [2]


def test_a_save_that_one_rank_does_not_begin(tmp_path: Path) -> None:
    run_ranks(fail_to_begin, 3, tmp_path)
