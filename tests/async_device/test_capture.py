"""Sharded models refuse calls in the capture of a CUDA graph before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zerocore
from tests.async_device.test_offload import backward, batch
from tests.async_device.training import Block, make_model, start
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.engine.offloading import STATES

Call = tuple[str, Callable[[], Any]]
AWAITED = "work on the host was awaited"  # with offload


def calls_of(model: Any, optimizer: Any, device: torch.device) -> list[Call]:
    """Returns the calls that a capture makes, and what the error says was called."""
    x, loss = batch(device, 0), model(batch(device, 0)).sum()

    def without_sync() -> None:
        with zerocore.no_sync(model):
            model(x)

    def unsharded() -> None:
        with zerocore.unsharded(model):
            pass

    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))  # creates the scaler's scale
    unscaled = f"GradScaler unscaled gradients|{AWAITED}"

    calls: list[Call] = [
        ("a sharded model was called", lambda: model(x)),
        ("a sharded model was called", without_sync),
        ("a unit of a sharded model was called", lambda: model[0](x)),
        ("backward went through a sharded model", loss.backward),
        ("an optimizer stepped parameters of a sharded model", optimizer.step),
        (unscaled, lambda: scaler.unscale_(optimizer)),
        (unscaled, lambda: scaler.step(optimizer)),
        ("clip_grad_norm_ was called", lambda: zerocore.clip_grad_norm_(model, 1.0)),
        ("a sharded model was used", unsharded),
        ("a sharded model was used", lambda: zerocore.full_state_dict(model)),
        ("a sharded model was used", lambda: list(zerocore.export(model))),
    ]
    if model[0].up.weight.place.group is not None:
        clip = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        calls.append((f"a norm over several ranks was taken|{AWAITED}", clip))
    return calls


def train_with_captures(captures: bool, options: dict[str, Any]) -> list[float]:
    """Returns the losses of steps, with all these calls between them."""
    device, extension = start(on_device=True)
    model: Any = zerocore.shard(make_model(device), units=[Block], **options)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        losses.append(backward(model, device, step))
        calls = calls_of(model, optimizer, device) if captures else []
        for said, call in calls:
            extension.begin_launches()
            extension.set_capturing(extension.current_stream())
            extension.forbid_host_waits("offload" not in options)  # offload's worker may wait
            with pytest.raises(RuntimeError, match=f"({said}).* in the capture of a CUDA graph"):
                call()
            extension.forbid_host_waits(False)
            extension.set_capturing(-1)
            assert extension.issued_launches() == []
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


@pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="torch says it from 2.13 on")
@pytest.mark.parametrize(
    "options", [*by_night({"stage": 0}, {"stage": 2}), {"stage": 3, "offload": STATES}]
)
def test_captures_are_refused_and_change_nothing(options: dict[str, Any]) -> None:
    found = run_ranks(train_with_captures, 2, True, options, launch="torchrun")
    assert found == run_ranks(train_with_captures, 2, False, options, launch="torchrun")
