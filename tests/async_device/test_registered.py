"""Memory that the backend registers: what collectives read and write on the device lies there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerocore
from tests.async_device.device import DEVICE
from tests.async_device.test_joint_launches import Mesh
from tests.async_device.test_weights import exported
from tests.async_device.training import Block, make_model, start, train
from tests.distributed.harness import run_ranks
from zerocore import Communication

MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 0}),  # gradients
    (2, {"stage": 1}),  # and parameters
    (3, {"stage": 2}),  # and the arena
    (3, {"stage": 3}),
    (2, {"stage": 1, "mixed_precision": MIXED}),
    (3, {"stage": 3, "mixed_precision": MIXED}),
    (3, {"stage": 2, "mixed_precision": zerocore.MixedPrecision(wire_dtype=torch.bfloat16)}),
    (2, {"stage": 2, "offload": zerocore.Offload(states="cpu", gradients="cpu")}),
    (1, {"offload": zerocore.Offload(states="cpu", gradients="cpu", parameters="cpu")}),
    (3, {"stage": 3, "communication": Communication(prefetch=2, reductions_in_flight=2)}),
]


def sharded(
    device: torch.device,
    registered: bool,
    communication: Communication | None = None,
    **options: Any,
) -> nn.Module:
    own = replace(communication or Communication(), overlap_reductions=False, registered=registered)
    return zerocore.shard(make_model(device), units=[Block], communication=own, **options)


def trained(
    model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer, steps: int
) -> list[torch.Tensor]:
    return train(model, device, steps, make_optimizer=lambda *_, **__: optimizer)


def windows_of(count: int, case: dict[str, Any]) -> None:
    device, extension = start(on_device=True)
    model = sharded(device, True, **case)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    losses = trained(model, device, optimizer, 2)
    made, windows, nbytes = extension.registrations()
    assert made == windows == count
    text = f"registered memory: {count} window{'s' * (count > 1)}, {nbytes / 2**20:,.1f} MiB"
    assert text in str(zerocore.report(model)) and text in zerocore.describe(model).title()
    extension.begin_launches()
    extension.set_delays(1, 0.3, 300)
    losses += trained(model, device, optimizer, 18)
    extension.synchronize()
    assert extension.registrations() == (made, windows, nbytes)
    assert extension.launches_by_memory(registered=False) == []
    assert len(extension.launches_by_memory(registered=True)) >= 18 * 4
    del model, optimizer
    gc.collect()
    extension.synchronize()
    assert extension.registrations() == (made, 0, 0)
    plain = sharded(device, False, **case)
    optimizer = zerocore.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = trained(plain, device, optimizer, 2) + trained(plain, device, optimizer, 18)
    assert torch.stack(losses).tolist() == torch.stack(expected).tolist()
    assert extension.registrations() == (made, 0, 0)
    assert "registered" not in str(zerocore.report(plain)) + zerocore.describe(plain).title()


@pytest.mark.one_by_day
@pytest.mark.parametrize(("count", "case"), CASES)
def test_collectives_of_a_step_touch_registered_memory_alone(
    count: int, case: dict[str, Any]
) -> None:
    run_ranks(windows_of, 2, count, case, launch="torchrun", timeout=120)


def parks() -> None:
    device, extension = start(on_device=True)
    losses = []
    for registered in (True, False):
        model = sharded(device, registered)
        optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append(trained(model, device, optimizer, 2))
        for turn in range(1, 4):
            with zerocore.parked(model, optimizer):
                extension.synchronize()
                assert extension.registrations()[1:] == (0, 0)
                exported(model, 3000)
                assert extension.registrations()[1:] == (0, 0)
            losses[-1] += trained(model, device, optimizer, 2)
            if registered:  # one window each: parameters, gradients and the arena
                assert extension.registrations()[:2] == (3 * (turn + 1), 3)
                assert "3 windows" in zerocore.describe(model).title()
        extension.begin_launches()
        losses[-1] += trained(model, device, optimizer, 2)
        assert bool(extension.launches_by_memory(registered=False)) is not registered
        del model, optimizer
        gc.collect()
        assert extension.registrations()[1:] == (0, 0)
    first, second = (torch.stack(each).tolist() for each in losses)
    assert first == second


def two_communicators() -> None:
    """Memory is registered only with the communicator of gathers."""
    device, extension = start(on_device=True)
    model = zerocore.shard(
        make_model(device), units=[Block], communication=Communication(registered=True)
    )
    train(model, device, steps=2)
    extension.begin_launches()
    train(model, device, steps=2)
    assert set(extension.launches_by_memory(registered=True)) == {"_ALLGATHER_BASE"}
    assert set(extension.launches_by_memory(registered=False)) == {"_REDUCE_SCATTER_BASE"}
    assert "registered memory for gathers alone: 3 windows" in zerocore.describe(model).title()


def replicas() -> None:
    """Sums over replicas go over another communicator."""
    device, extension = start(on_device=True)
    mesh = Mesh(f"cpu:gloo,{DEVICE}:{DEVICE}")
    losses = []
    for registered in (True, False):
        model = sharded(device, registered, group=mesh)
        losses.append(train(model, device, steps=2))
        extension.begin_launches()
        losses[-1] += train(model, device, steps=2)
        if registered:
            touched = set(extension.launches_by_memory(registered=True))
            assert touched == {"_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"}
            assert set(extension.launches_by_memory(registered=False)) == {"ALLREDUCE"}
    first, second = (torch.stack(each).tolist() for each in losses)
    assert first == second


def changes() -> None:
    """Steps of several kinds replace the arena, and never hold two."""
    device, extension = start(on_device=True)
    model = sharded(device, True, Communication(accumulate="full"))
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        x = torch.ones(4, 32, device=device)
        with torch.no_grad():
            model(x)
        if step >= 2:
            with zerocore.no_sync(model):
                model(x).sum().backward()
        trained(model, device, optimizer, 1)
        assert extension.registrations()[1] <= 3  # the next arena comes with the next gather
    with zerocore.unsharded(model):
        assert extension.registrations()[1] <= 3
    made = extension.registrations()[0]
    assert made > 3
    trained(model, device, optimizer, 3)
    assert extension.registrations()[:2] == (made, 3)


def is_refused() -> None:
    device, extension = start(on_device=True)
    extension.refuse_registration("no window is left")
    with pytest.raises(RuntimeError, match=r"registered=True: asyncdev .* no window is left"):
        sharded(device, True)


@pytest.mark.parametrize("check", [parks, two_communicators, replicas, changes, is_refused])
def test_windows(check: Callable[[], None]) -> None:
    run_ranks(check, 4 if check is replicas else 2, launch="torchrun", timeout=120)
