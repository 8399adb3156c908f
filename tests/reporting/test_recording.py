"""``zerocore.trace``: boxes of modules and collectives, Chrome traces, pictures."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.reporting.test_report import WIDTH, Chain, train
from zerocore.reporting.events import ONE_QUEUE, Event
from zerocore.reporting.timeline import WAIT, Box, event_boxes


@pytest.fixture
def emulated() -> Iterator[None]:
    with zerocore.emulate(4, "1GB/s", 0):
        yield


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zerocore.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    return model, optimizer


def kinds(timeline: zerocore.reporting.Timeline) -> list[tuple[str, str]]:
    """Kind and unit of what the host did, in order."""
    boxes = sorted((b for b in timeline.boxes if b.lane == "compute"), key=lambda b: b.start_ns)
    for earlier, later in itertools.pairwise(boxes):
        assert earlier.end_ns <= later.start_ns
    return [(box.kind, box.label.removeprefix("blocks.")) for box in boxes]


def test_boxes_of_a_step(emulated: None) -> None:
    model, optimizer = trained(Chain(3))
    with zerocore.trace(model) as timeline:
        train(model, optimizer, 1)
    forward, backward = ([(kind, unit) for unit in "012"] for kind in ("forward", "backward"))
    assert kinds(timeline) == [*forward, *backward[::-1], ("optimizer", "")]
    lanes = [box.lane for box in timeline.boxes]
    planned = [op for op, *_ in zerocore.planning.predict_events(model)]
    for op in ("all_gather", "reduce_scatter"):
        assert lanes.count(op) == planned.count(op)
    assert timeline.label == "emulated: Chain, stage 3, rank 0 of 4, cpu"
    assert (
        max(nbytes for _, nbytes in timeline.pool) == zerocore.planning.predict_memory(model).pool
    )


class Outer(nn.Module):
    """A unit around another one, which is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x * self.scale, use_reentrant=False) * self.scale


def test_enclosing_and_recomputed_units(emulated: None) -> None:
    model = zerocore.shard(Outer(), stage=3, units=["inner"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 1)
    with zerocore.trace(model) as timeline:
        model(torch.randn(3, WIDTH)).sum().backward()
    found = kinds(timeline)
    assert [kind for kind, _ in found[:3]] == ["forward"] * 3
    assert [unit for _, unit in found[:3]] == [found[0][1], "inner", found[0][1]]
    assert ("recompute", "inner") in found[3:]
    assert {kind for kind, _ in found[3:]} == {"backward", "recompute"}


def test_nothing_is_left_behind(emulated: None) -> None:
    model, optimizer = trained(Chain(2))
    with zerocore.trace(model) as timeline:
        output = model(torch.randn(3, WIDTH))
    num_boxes = len(timeline.boxes)
    output.sum().backward()  # its hooks fire after the recording
    train(model, optimizer, 1)
    assert len(timeline.boxes) == num_boxes
    assert not any(module._forward_hooks for module in model.modules())


def test_files(emulated: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, optimizer = trained(Chain(2))
    paths = [tmp_path / "trace.json", tmp_path / "trace.png"]
    with zerocore.trace(model, *map(str, paths)) as timeline:
        train(model, optimizer, 1)
    written = json.loads(paths[0].read_text())
    boxes = [record for record in written["traceEvents"] if record["ph"] == "X"]
    assert len(boxes) == len(timeline.boxes)
    assert min(box["ts"] for box in boxes) == 0
    assert {"forward blocks.0", "all_gather blocks.1", "optimizer"} <= {b["name"] for b in boxes}
    assert "emulated" in written["otherData"]["label"]
    counters = [record for record in written["traceEvents"] if record["ph"] == "C"]
    assert [record["args"]["bytes"] for record in counters] == [n for _, n in timeline.pool]
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_a_path_of_another_kind_is_refused_at_once(emulated: None, tmp_path: Path) -> None:
    model, _ = trained(Chain(2))
    with pytest.raises(ValueError, match=r"\.json or \.png file, got 'trace\.txt'"):
        zerocore.trace(model, "trace.txt").__enter__()
    for name in ("x.json", "x.png"):
        with pytest.raises(ValueError, match=rf"no folder '{tmp_path}/no'; make it first"):
            zerocore.trace(model, tmp_path / "no" / name).__enter__()
    with zerocore.reporting.record_events(model):
        pass


def test_a_picture_without_matplotlib_is_refused_at_once(
    emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained(Chain())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install .zerocore\[plot\]"):
        zerocore.trace(model, tmp_path / "trace.png").__enter__()
    with zerocore.trace(model, tmp_path / "trace.json"):
        pass


def test_a_failed_step_ends_the_recording(emulated: None) -> None:
    model, optimizer = trained(Chain(2))
    with pytest.raises(RuntimeError), zerocore.trace(model):
        model(torch.randn(3, WIDTH + 1))
    with zerocore.trace(model) as timeline:
        train(model, optimizer, 1)
    assert ("backward", "0") in kinds(timeline)


def test_boxes_of_communication() -> None:
    def event(op: str, unit: str, issued: int, done: int, wait: int) -> Event:
        return Event(op, unit, 8, 0, issued, done, wait)

    events = [
        event("unshard", "0", 0, -1, 0),
        event("all_gather", "0", 0, 10, 10),
        event("all_gather", "1", 2, 20, 0),
        event("reduce_scatter", "1", 50, 60, 4),
    ]
    assert event_boxes(events, ONE_QUEUE) == [
        Box("all_gather", "0", "all_gather", 0, 10),
        Box(WAIT, "0", WAIT, 0, 10),
        Box("all_gather", "1", "all_gather", 10, 20),  # the link was busy until 10
        Box("reduce_scatter", "1", "reduce_scatter", 50, 60),
        Box(WAIT, "1", WAIT, 56, 60),
    ]
