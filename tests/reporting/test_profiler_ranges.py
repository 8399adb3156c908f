"""torch.profiler shows what each unit does, by its name; nothing is entered without a profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.autograd import profiler

import zerocore
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

RANGES = ("forward", "pre_backward", "all_gather", "wait_all_gather", "reduce", "wait_reduce")


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zerocore.shard(Chain(), stage=3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled() -> tuple[list[str], dict[str, int]]:
    """Names of units, and how often each range came in one step."""
    model, optimizer = make()
    train(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, optimizer)
    names = [unit.name for unit in state_of(model).units]
    found = Counter(event.name for event in profile.events() if "zerocore::" in event.name)
    return names, dict(found)


def test_ranges_of_two_ranks_have_the_names_of_units() -> None:
    # Fresh ranks: a process may have had a profiler before.
    for names, found in run_ranks(profiled, 2, fresh=True):
        assert len(names) > 2
        for name in names:
            times = [found.get(f"zerocore::{what} ({name})", 0) for what in RANGES]
            # The last unit stays gathered for its backward, or is gathered for it again.
            assert times[0] == times[1] == times[4] == 1, (name, found)
            assert times[2] in (1, 2), (name, found)
            assert times[3] >= times[2], (name, found)
            assert times[5] >= 1, (name, found)
        kinds = {name.split("::")[1].split(" ")[0] for name in found}
        assert kinds == set(RANGES)


def test_ranges_nest_in_the_calls_that_cause_them() -> None:
    with zerocore.emulate(2, "inf"):
        model, optimizer = make()
        train(model, optimizer)
        with torch.profiler.profile() as profile:
            train(model, optimizer)
    events = [event for event in profile.events() if event.name.startswith("zerocore::forward")]
    assert events
    for event in events:
        inside = {child.name for child in event.cpu_children}
        assert any(name.startswith("aten::") for name in inside), inside


def test_nothing_is_entered_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes no range; in C++ RecordFunction makes none of its own."""
    made: list[str] = []
    init = profiler.record_function.__init__

    def noting(self: Any, name: str, *args: Any) -> None:
        made.append(name)
        init(self, name, *args)

    with zerocore.emulate(2, "inf"):
        model, optimizer = make()
        train(model, optimizer)
        monkeypatch.setattr(profiler.record_function, "__init__", noting)
        train(model, optimizer)
        assert not any("zerocore" in name for name in made)  # torch's optimizers make one
        with profiler.profile():
            train(model, optimizer)
        assert "zerocore::forward (blocks.0)" in made
