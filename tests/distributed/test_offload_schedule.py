"""The order of a step with states on the host, who waits for it, its bytes, errors and refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.offloading import (
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
from zerocore import MixedPrecision, Offload, emulated
from zerocore._C import HostUpdate
from zerocore.common.host_link import set_emulated_host_link
from zerocore.model.state import state_of


def record_step(stage: int, offload: Offload) -> list[zerocore.Event]:
    """Events from a backward to the next forward, over a slow link."""
    set_emulated_host_link(emulated.link("1GB/s,20ms"))
    model, optimizer = blocks(stage, offload)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with zerocore.record_events(model) as events:
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
        # The forward began when its first unit had come back; the others were on their way.
        assert by_op["all_gather", "0"].issued_ns < by_op["to_device", "3"].issued_ns
        # The next unit is updated while weights return.
        assert by_op["host_update", "1"].issued_ns < by_op["to_device", "0"].done_ns


def test_units_leave_and_return_one_by_one() -> None:
    run_ranks(check_order, 2)


def check_readers() -> None:
    """Whoever reads after a step finds all of it done."""
    set_emulated_host_link(emulated.link("1GB/s,20ms"))
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
    mixed = (None, BF16, MixedPrecision(torch.bfloat16, grad_dtype=torch.bfloat16))
    for stage in range(4):
        for offload in offloads_of(stage):
            for precision in mixed:
                model, optimizer = blocks(stage, offload, mixed_precision=precision)
                for _ in range(2):
                    backward(model)
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.synchronize()
                what = f"stage {stage}, {offload}, {precision}"
                measured = zerocore.memory_usage(model, optimizer)
                assert zerocore.predict_memory(model) == measured, what
                assert measured.host > 0, what
                assert zerocore.report(model).memory.host == measured.host, what
                assert "on the host" in zerocore.describe(model).title()


def test_planned_bytes_are_those_taken(world_size: int) -> None:
    run_ranks(check_memory, world_size)


def fail_on_one_rank() -> str:
    """What the ranks are told when an update has failed on rank 0."""
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
    ):
        refused(lambda options=options: Offload(**options))
    refused(lambda: Offload(states="device", parameters="cpu"))
    refused(lambda: Offload(states="device"))
    model, _ = blocks(3, STATES)
    muon = zerocore.optim.Muon(model.named_parameters(), lr=0.01)
    backward(model)
    refused(muon.step)
    return errors


def test_refusals_are_named_on_every_rank() -> None:
    errors, other = run_ranks(refuse_all, 2)
    assert errors == other
    parts = ["gradients='cpu' needs stage 2", "parameters='cpu' needs stage 3", "zerocore.Offload"]
    parts += ["'disk' needs path=", "'device' or 'cpu', got 'disk'"]
    parts += ["'device', 'cpu' or 'disk', got 'host'", "got 1", "path= goes with it"]
    parts += ["goes with states='cpu'", "nothing leaves", "Muon moves whole matrices"]
    for error, part in zip(errors, parts, strict=True):
        assert part in error
