"""The order of a step with states on the host, who waits for it, its bytes, errors and refusals."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.engine.offloading import (
    ALL,
    BF16,
    BOTH,
    GRADIENTS,
    STATES,
    assert_same_bits,
    backward,
    blocks,
    offloads_of,
)
from zerocore import MixedPrecision, Offload
from zerocore._C import HostUpdate
from zerocore.model.state import state_of


def record_step(stage: int, offload: Offload) -> list[zerocore.reporting.Event]:
    """Events from a backward to the next forward."""
    model, optimizer = blocks(stage, offload)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with zerocore.reporting.record_events(model) as events:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
    return events


def check_order() -> None:
    for stage in (1, 2, 3):
        events = record_step(stage, STATES)
        ops = [(event.op, event.unit) for event in events]
        names = ["0", "1", "2", "3"]
        first = ops[: ops.index(("host_update", "0"))]
        # Gradients leave under the backward: that of the last unit before the first is reduced.
        assert first.index(("to_host", "3")) < first.index(("reduce_scatter", "0"))
        assert [unit for op, unit in first if op == "to_host"] == names[::-1]
        # Units are updated in the order of the forward, and their weights return at once.
        both = [(op, unit) for op, unit in ops if op in ("host_update", "to_device")]
        assert both == [(op, unit) for unit in names for op in ("host_update", "to_device")]
        # The first of each, behind those of the backward.
        by_op = {(event.op, event.unit): event for event in reversed(events[len(first) :])}
        for unit in names:
            update, sent = by_op["host_update", unit], by_op["to_device", unit]
            assert update.done_ns <= sent.issued_ns
            assert sent.done_ns <= by_op["all_gather", unit].issued_ns
        # Squares are summed as each gradient arrives; all are known when the first unit is updated.
        assert [unit for op, unit in first if op == "host_squares"] == names[::-1]
        squares = {
            event.unit: event for event in events[: len(first)] if event.op == "host_squares"
        }
        arrived = {event.unit: event for event in events[: len(first)] if event.op == "to_host"}
        for unit in names:
            assert arrived[unit].done_ns <= squares[unit].issued_ns
            assert squares[unit].done_ns <= by_op["host_update", "0"].issued_ns
        # Under the backward: the last unit's before the first one's gradient has come.
        assert squares["3"].done_ns <= arrived["0"].done_ns


def test_units_leave_and_return_one_by_one() -> None:
    run_ranks(check_order, 2)


def arrivals_and_gathers(
    events: list[zerocore.reporting.Event],
) -> Iterator[tuple[zerocore.reporting.Event, zerocore.reporting.Event]]:
    """The loads from the host after a step, and the first gather of each."""
    begin = next(index for index, event in enumerate(events) if event.op == "host_update")
    for unit in ("0", "1", "2", "3"):
        of_unit = [event for event in events[begin:] if event.unit == unit]
        arrival = next(event for event in of_unit if event.op == "to_device")
        yield arrival, next(event for event in of_unit if event.op == "all_gather")


def check_loads() -> None:
    """Gathers begin behind the loads of their parameters, and those behind the update."""
    events = record_step(3, ALL)
    updates = {event.unit: event for event in events if event.op == "host_update"}
    for load, gather in arrivals_and_gathers(events):
        assert updates[load.unit].done_ns <= load.issued_ns
        assert load.done_ns <= gather.issued_ns  # gloo has no way to wait: the host does


def test_gathers_wait_for_loads() -> None:
    run_ranks(check_loads, 2)


def test_squares_are_summed_where_a_step_asks_for_their_norm() -> None:
    with zerocore.emulate(4, "10GB/s", "1ms"):
        model, optimizer = blocks(3, STATES)
        optimizer.clip_grad_norm = None
        for _ in range(2):
            backward(model)
            optimizer.step()
        assert state_of(model).engine.counters["host_squares"].count == 0


def norms_of_changed_gradients(offload: Offload | None) -> list[torch.Tensor]:
    """With gradients that are changed between a backward and its step, each in another way."""
    changes: list[Callable[[Any], Any]] = [
        lambda param: None,
        lambda param: param.grad.mul_(3),
        lambda param: setattr(param, "grad", param.grad * 2),
        lambda param: param.grad.local().fill_(0.25),
        lambda param: setattr(param, "grad", None),
        lambda param: None,
    ]
    model, optimizer = blocks(2, offload)
    norms = []
    for change in changes:
        backward(model)
        change(next(iter(model.parameters())))
        optimizer.step()
        assert isinstance(optimizer.grad_norm, torch.Tensor)
        norms.append(optimizer.grad_norm.clone())
        optimizer.zero_grad()
    return [*norms, *zerocore.full_state_dict(model, rank0_only=False).values()]


def check_changed_gradients() -> None:
    expected = norms_of_changed_gradients(None)
    for offload in (STATES, BOTH):
        assert all(map(torch.equal, norms_of_changed_gradients(offload), expected)), offload


def test_squares_of_changed_gradients_are_summed_again() -> None:
    run_ranks(check_changed_gradients, 2)


def num_threads_of_update(threads: int | None) -> int:
    """Threads that a step starts: the worker, and those that share its loops."""
    model = zerocore.shard(nn.Linear(512, 1024), stage=1, offload=Offload(threads=threads))
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    gc.collect()  # models of before, and their threads
    before = num_tasks()
    model(torch.randn(1, 512)).square().mean().backward()
    optimizer.step()
    optimizer.synchronize()
    return num_tasks() - before


def num_tasks() -> int:
    """Threads of this process; OpenMP does not wait for those that end with the one they served."""
    found = -1
    while (count := len(list(Path("/proc/self/task").iterdir()))) != found:
        found = count
        time.sleep(0.2)
    return count


def check_threads() -> None:
    torch.set_num_threads(1)  # as many as an update has where the CPU computes
    num_threads_of_update(1)  # what else the first step of a process starts
    assert [num_threads_of_update(threads) for threads in (1, 3, 5, None)] == [1, 3, 5, 1]


def test_an_update_has_as_many_threads_as_asked() -> None:
    run_ranks(check_threads, 1, fresh=True)


def check_readers() -> None:
    """A read after a step finds all of it done."""
    readers: dict[str, Callable[[nn.Module, Any], Any]] = {
        "full_state_dict": lambda model, _: zerocore.full_state_dict(model, rank0_only=False),
        "state_dict": lambda model, _: {k: v.local() for k, v in model.state_dict().items()},
        "full_tensor": lambda model, _: {n: p.full_tensor() for n, p in model.named_parameters()},
        "norm": lambda model, _: {n: p.detach().norm() for n, p in model.named_parameters()},
        "optimizer": lambda _, optimizer: {
            str(key): value["exp_avg"].local()
            for key, value in optimizer.state_dict()["state"].items()
        },
    }
    for name, read in readers.items():
        found = []
        for offload in (None, STATES, ALL):
            model, optimizer = blocks(3, offload)
            for _ in range(2):
                backward(model)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            found.append({key: value.clone() for key, value in read(model, optimizer).items()})
        for other in found[1:]:
            assert_same_bits(other, found[0], name)


def check_checkpoints(folder: str) -> None:
    """A checkpoint right after a step, and loaded without offload; and the other way around."""
    for index, (saving, loading) in enumerate(((ALL, None), (None, ALL), (STATES, BOTH))):
        path = f"{folder}/{index}"
        model, optimizer = blocks(3, saving)
        backward(model)
        optimizer.step()
        checkpoints = zerocore.Checkpoints(path, model, optimizer)
        checkpoints.save(1)
        checkpoints.wait()
        other, fresh = blocks(3, loading)
        assert zerocore.Checkpoints(path, other, fresh).load() == 1
        results = []
        for trained, by in ((model, optimizer), (other, fresh)):
            by.zero_grad()
            backward(trained)
            by.step()
            results.append(zerocore.full_state_dict(trained, rank0_only=False))
        assert_same_bits(*results, f"{saving} to {loading}")


def test_readers_wait_for_the_step() -> None:
    run_ranks(check_readers, 2)


def test_checkpoints_of_any_offload() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_checkpoints, 2, folder)


def check_memory() -> None:
    """Precisions come in turn: by night, on all numbers of ranks, each meets all offloads."""
    mixed = (None, BF16, MixedPrecision(torch.bfloat16, grad_dtype=torch.bfloat16))
    precisions = itertools.islice(itertools.cycle(mixed), dist.get_world_size(), None)
    for stage in range(4):
        for offload, precision in zip(offloads_of(stage), precisions, strict=False):
            model, optimizer = blocks(stage, offload, mixed_precision=precision)
            for _ in range(2):
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            what = f"stage {stage}, {offload}, {precision}"
            measured = zerocore.memory_usage(model, optimizer)
            assert zerocore.planning.predict_memory(model) == measured, what
            assert measured.host > 0, what
            assert zerocore.report(model).memory.host == measured.host, what
            assert "on the host" in zerocore.describe(model).title()


@pytest.mark.one_by_day
def test_planned_bytes_are_those_taken(world_size: int) -> None:
    run_ranks(check_memory, world_size)


def fail_on_one_rank() -> str:
    """The errors of the ranks when an update has failed on rank 0."""
    model, optimizer = blocks(3, STATES)
    backward(model)
    optimizer.step()
    if dist.get_rank() == 0:
        engine, lists = state_of(model).engine, [[]] * 6
        wrong = [(torch.zeros(2), torch.zeros(3))]
        numbers = dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), 0.0)
        engine.update_on_host(
            HostUpdate(
                0, [], *lists, wrong, **numbers, maximize=False, grad_scale=None, found_inf=None
            )
        )
        engine.send_weights(0)
    try:
        backward(model)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_failed_update_reaches_all_ranks() -> None:
    failed, other = run_ranks(fail_on_one_rank, 2)
    assert "must match the size" in failed
    assert "the forward raised on rank 0" in other


def refuse_all() -> list[str]:
    errors = []

    def refused(act: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, TypeError)) as error:
            act()
        errors.append(str(error.value))

    for stage, offload in ((1, GRADIENTS), (2, ALL), (3, "cpu")):
        refused(lambda stage=stage, offload=offload: blocks(stage, offload))
    for options in (
        {"states": "disk"},
        {"gradients": "disk", "path": "/tmp"},
        {"states": "host"},
        {"states": 1},
        {"path": "/tmp"},
        {"threads": 0},
        {"threads": 1.0},
    ):
        refused(lambda options=options: Offload(**options))
    refused(lambda: Offload(states="device", parameters="cpu"))
    refused(lambda: Offload(states="device"))
    return errors


def test_refusals_are_named_on_every_rank() -> None:
    errors, other = run_ranks(refuse_all, 2)
    assert errors == other
    parts = ["gradients='cpu' needs stage 2", "parameters='cpu' needs stage 3", "zerocore.Offload"]
    parts += ["'disk' needs path=", "'device' or 'cpu', got 'disk'"]
    parts += ["'device', 'cpu' or 'disk', got 'host'", "got 1", "path= needs a part"]
    parts += ["threads must be at least 1, got 0", "threads must be an int, got 1.0"]
    parts += ["needs states='cpu'", "all parts are on the device"]
    for error, part in zip(errors, parts, strict=True):
        assert part in error
