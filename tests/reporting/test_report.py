"""The always-on meters: steps, counts and bytes against the plan, sampling, and their report."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zerocore
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks
from zerocore._C import allocator_counts
from zerocore.common.tables import render_table
from zerocore.model.meters import KEPT_STEPS, SAMPLE_EVERY, increase
from zerocore.model.state import state_of
from zerocore.reporting.events import ONE_QUEUE, Event, queues_of_device, transfers
from zerocore.reporting.step_figures import CommunicationTimes, times_by_unit

RANKS = 4


@pytest.fixture
def emulated() -> Iterator[None]:
    with zerocore.emulate(RANKS, "1GB/s", 0):
        yield


def make(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zerocore.shard(Chain(), stage=stage)
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, micro: int = 1):
    for _ in range(num_steps):
        for _ in range(micro):
            model(torch.randn(3, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counts_and_bytes_of_each_step_equal_the_plan(emulated: None, stage: int) -> None:
    model, optimizer = make(stage)
    train(model, optimizer, 20)
    planned = zerocore.planning.predict_events(model)
    steps = zerocore.report(model).steps
    assert [step.number for step in steps] == list(range(20))
    for step in steps[1:]:
        assert step.num_collectives == len(planned)
        gathered = sum(nbytes for op, _, nbytes in planned if op == "all_gather")
        assert step.gathered_nbytes == gathered
        assert step.reduced_nbytes == sum(nbytes for *_, nbytes in planned) - gathered
        assert step.pool_nbytes == zerocore.planning.predict_memory(model).pool


def test_the_pool_is_metered_by_step(emulated: None) -> None:
    """A gather right after the third update shows in that step, and in the total."""
    model, optimizer = make(3)
    train(model, optimizer, 3)
    with zerocore.unsharded(model):
        whole = state_of(model).engine.pool_stats.in_use_nbytes
    train(model, optimizer, 2)
    found = zerocore.report(model)
    usual = zerocore.planning.predict_memory(model).pool
    assert [step.pool_nbytes for step in found.steps] == [usual, usual, whole, usual, usual]
    assert found.memory.pool_peak == whole > usual
    slots = [step.num_pool_allocations for step in found.steps]
    assert slots[0] > 0 and slots[2] > 0
    assert [slots[1], *slots[3:]] == [0, 0, 0]
    assert sum(slots) == state_of(model).engine.pool_stats.num_allocations
    text = str(found)
    assert "peaks so far: bucket pool" in text and "bucket pool, peak MiB" in text


def test_counts_of_the_allocator_are_differences() -> None:
    assert increase(3, 5) == 2
    assert increase(5, 1) == 1  # reset by the user, then counted once
    assert allocator_counts("cpu") is None
    model, optimizer = make(3)
    train(model, optimizer, 2)
    found = zerocore.report(model)
    assert {step.num_retries for step in found.steps} == {None}
    assert found.mean("num_device_allocations") is found.memory.num_device_allocations is None
    assert "allocator so far" not in str(found)


def test_a_report_with_counts_of_the_allocator(emulated: None) -> None:
    """As on a GPU: means of the steps, and totals that say so."""
    model, optimizer = make(3)
    train(model, optimizer, 3)
    found = zerocore.report(model)
    steps = tuple(
        replace(step, num_retries=step.number, num_device_allocations=4) for step in found.steps
    )
    memory = replace(found.memory, num_retries=7, num_device_allocations=30)
    found = replace(found, steps=steps, memory=memory)
    assert found.mean("num_retries") == 1.5
    text = str(found)
    assert "allocator so far: 7 retries, 30 device allocations" in text
    row = re.search(r"allocator retries\D+([\d.]+)\D+([\d.]+)", text)
    assert row is not None and row.groups() == ("1.50", "2.00")


def test_one_step_in_sixteen_is_traced(emulated: None) -> None:
    model, optimizer = make(3)
    train(model, optimizer, SAMPLE_EVERY + 3)
    found = zerocore.report(model)
    traced = [step.number for step in found.steps if step.communication is not None]
    assert traced == [1, SAMPLE_EVERY + 1]
    assert set(found.units) == {f"blocks.{index}" for index in range(4)}
    for step in found.steps:
        if step.communication is not None:
            assert step.communication.all_gather_ms > 0
            assert step.communication.reduce_ms > 0
            assert step.idle_ms >= step.communication.exposed_ms


def test_micro_batches_and_two_optimizers_make_one_step(emulated: None) -> None:
    model = zerocore.shard(Chain(), stage=2)
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[:4], 0.1), torch.optim.SGD(params[4:], 0.1)]
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(3, WIDTH)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    steps = zerocore.report(model).steps
    assert len(steps) == 3
    assert steps[1].reduced_nbytes == 2 * sum(
        nbytes
        for op, _, nbytes in zerocore.planning.predict_events(model)
        if op == "reduce_scatter"
    )


def test_evaluation_is_part_of_no_step(emulated: None) -> None:
    model, optimizer = make(3)
    train(model, optimizer, 3)
    expected = zerocore.report(model).steps[-1].num_collectives
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(3, WIDTH))
    train(model, optimizer, 1)
    steps = zerocore.report(model).steps
    assert len(steps) == 4
    assert steps[-1].num_collectives == expected


def test_asking_does_not_end_a_step(emulated: None) -> None:
    model, optimizer = make(1)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert zerocore.report(model).steps == ()
    optimizer.step()
    assert len(zerocore.report(model).steps) == 1
    assert len(zerocore.report(model).steps) == 1


def test_a_recording_takes_the_place_of_a_sample(emulated: None) -> None:
    model, optimizer = make(3)
    train(model, optimizer, 1)
    with zerocore.reporting.record_events(model) as events:
        train(model, optimizer, 1)
    train(model, optimizer, 1)
    collectives = [event for event in events if event.op in ("all_gather", "reduce_scatter")]
    found = zerocore.report(model)
    assert len(collectives) == found.steps[1].num_collectives
    assert [step.communication for step in found.steps] == [None] * 3


def test_a_recording_that_begins_within_a_sample(emulated: None) -> None:
    model, optimizer = make(3)
    train(model, optimizer, 1)
    model(torch.randn(3, WIDTH))  # the traced step has begun
    with zerocore.reporting.record_events(model) as events:
        train(model, optimizer, 1)
    assert [event.op for event in events].count("reduce_scatter") == 4
    assert zerocore.report(model).steps[1].communication is None


def test_recordings_do_not_nest(emulated: None) -> None:
    model, _ = make(3)
    with (
        zerocore.reporting.record_events(model),
        pytest.raises(ValueError, match="do not nest"),
        zerocore.trace(model),
    ):
        pass
    with zerocore.reporting.record_events(model):
        pass


def test_memory_of_the_meters_is_bounded() -> None:
    model, _ = make(0)
    meters = state_of(model).meters
    for _ in range(KEPT_STEPS + 5):
        meters.begin_pass()
        meters.note_update()
    assert len(meters.steps()) == KEPT_STEPS
    assert meters.steps()[-1].number == KEPT_STEPS + 4


def test_tokens_and_flops(emulated: None) -> None:
    model, optimizer = make(3)
    train(model, optimizer, 3)
    numel = 4 * (WIDTH * WIDTH + WIDTH)
    step = zerocore.report(model, tokens=96, peak_flops=1e9).steps[2]
    assert step.tokens_per_s == pytest.approx(96 / (step.step_ms / 1e3))
    assert step.mfu == pytest.approx(step.tokens_per_s * 6 * numel / 1e9)
    step = zerocore.report(model, tokens=96, flops_per_token=10, peak_flops=1e3).steps[2]
    assert step.mfu == pytest.approx(step.tokens_per_s * 10 / 1e3)
    assert zerocore.report(model, tokens=96).steps[2].mfu is None  # no known peak of a CPU
    assert zerocore.report(model).steps[2].tokens_per_s is None
    for name in ("tokens", "flops_per_token", "peak_flops"):
        for wrong in (0, float("nan"), float("inf")):
            with pytest.raises(
                ValueError, match=f"{name} must be positive and finite, got {wrong}"
            ):
                zerocore.report(model, **{name: wrong})
        with pytest.raises(TypeError, match=f"{name} must be a number, got 'x'"):
            zerocore.report(model, **{name: "x"})


def test_only_sharded_models_have_a_report() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        zerocore.report(Chain())


def test_table_and_lines(emulated: None, tmp_path: Path) -> None:
    model, optimizer = make(3)
    assert "no step was completed" in str(zerocore.report(model))
    train(model, optimizer, 4)
    found = zerocore.report(model, tokens=3)
    text = str(found)
    for part in ("emulated, mean of 3 steps", "overlap, %", "bucket pool", "blocks.3"):
        assert part in text
    found.write_jsonl(tmp_path / "steps.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2, 3]
    assert {line["source"] for line in lines} == {"emulated"}
    assert lines[1]["communication"]["exposed_ms"] >= 0
    units = lines[1]["units"]
    assert set(units) == {f"blocks.{i}" for i in range(4)} and lines[2]["units"] is None
    exposed = sum(unit["exposed_ms"] for unit in units.values())
    assert exposed == pytest.approx(lines[1]["communication"]["exposed_ms"])
    assert json.loads(json.dumps(found.to_dict()))["memory"]["allocated_peak"] is None


def test_without_a_group_the_source_is_measured() -> None:
    model, optimizer = make(3)
    train(model, optimizer, 3)
    found = zerocore.report(model)
    assert found.source == "measured"
    assert found.steps[1].num_collectives == 0
    assert found.mean_communication("overlap") is None


def test_plain_table_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["unit", "ms"], ["block", "1.5"]]
    assert "│" in render_table("title", rows)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert render_table("title", rows, ["note"]) == "title\nunit    ms\nblock  1.5\n  note"


def test_link_times() -> None:
    def event(op: str, unit: str, issued: float, done: float, wait: float) -> Event:
        return Event(op, unit, 8, 0, *(int(ms * 1e6) for ms in (issued, done, wait)))

    events = [
        event("unshard", "a", 0, -1e-6, 0),
        event("all_gather", "a", 0, 10, 10),
        event("all_gather", "b", 2, 20, 0),
        event("all_gather", "c", 3, -1e-6, 0),  # not known when it was done
        event("reduce_scatter", "a", 50, 60, 4),
    ]
    begins = [begin / 1e6 for _, begin in transfers(events, ONE_QUEUE)]
    assert begins == [0, 10, 50]  # the link was busy until 10
    replicas = [event("all_reduce", "a", 4, 30, 0), event("all_reduce", "b", 5, 40, 0)]
    begins = [
        begin / 1e6
        for _, begin in transfers([*events[:3], *replicas], queues_of_device(own_reductions=False))
    ]
    assert begins == [0, 10, 4, 30]  # they have a communicator of their own
    assert times_by_unit(events, ONE_QUEUE) == {
        "a": CommunicationTimes(10, 10, 14),
        "b": CommunicationTimes(10, 0, 0),
    }
    assert CommunicationTimes(10, 10, 14).overlap == pytest.approx(0.3)
    assert CommunicationTimes().overlap is None


def measure_on_this_rank() -> tuple[str, list[int], list[int], int]:
    model, optimizer = make(3)
    train(model, optimizer, 4)
    found = zerocore.report(model)
    planned = len(zerocore.planning.predict_events(model))
    traced = [step.number for step in found.steps if step.communication is not None]
    return found.source, [step.num_collectives for step in found.steps], traced, planned


def test_on_real_ranks() -> None:
    for source, counts, traced, planned in run_ranks(measure_on_this_rank, 2):
        assert source == "measured"
        assert counts[1:] == [planned] * 3
        assert traced == [1]
