"""Models whose state leaves the device for a while."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.training import accumulate, case_named
from tests.engine.offloading import BF16, STATES
from tests.weights.test_export import Stack, assert_same, exported
from zerocore.common.alarm import STALL_SECONDS


def train(parks: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full state after steps, with the model parked between them or not."""
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), **options)
    make: Any = zerocore.optim.AdamW if "offload" in options else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(4):
        accumulate(model, case, step)
        if parks and step != 1:  # also with gradients
            before = exported(model)
            with zerocore.parked(model, optimizer):
                assert_same(exported(model, max_bytes=2000), before)
                with pytest.raises(RuntimeError, match="is parked"):
                    accumulate(model, case, step)
                with pytest.raises(RuntimeError, match="is parked"):
                    optimizer.step()
                with (
                    pytest.raises(RuntimeError, match="is parked"),
                    zerocore.parked(model, optimizer),
                ):
                    pass
            assert_same(exported(model), before)
        optimizer.step()
        optimizer.zero_grad()
    full = zerocore.full_state_dict(model, rank0_only=False)
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    moments = {f"moment of {index}": state["exp_avg_sq"] for index, state in states.items()}
    return {**full, **moments}


def compare(options: dict[str, Any]) -> None:
    assert_same(train(True, options), train(False, options))


def compare_near() -> None:
    """Memory that is kept for near ranks and replicas is dropped, not brought back as it was."""
    mesh = init_device_mesh("cpu", (2, 2))
    compare({"stage": 3, "communication": zerocore.Communication(regather=2)})
    compare(
        {
            "stage": 3,
            "group": mesh,
            "communication": zerocore.Communication(replicas_share="optimizer"),
        }
    )
    model = zerocore.shard(
        Stack(), stage=3, units=["Linear"], communication=zerocore.Communication(regather=2)
    )
    plain = zerocore.shard(Stack(), stage=3, units=["Linear"])
    model(torch.ones(1, 64))
    own = [zerocore.memory_usage(each).parameters for each in (plain, model)]
    with zerocore.parked(model):
        exported(model)
        assert zerocore.memory_usage(model).parameters == own[0] < own[1]
    model(torch.ones(1, 64))
    assert zerocore.memory_usage(model).parameters == own[1]


def test_near_ranks() -> None:
    run_ranks(compare_near, 4)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in range(4)),
        {"stage": 3, "mixed_precision": BF16},
        {"stage": 2, "mixed_precision": BF16},
        {"stage": 3, "offload": STATES},
    ],
    ids=str,
)
def test_bits_are_the_same(options: dict[str, Any]) -> None:
    run_ranks(compare, 2, options)


def stop_taking() -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    buckets = zerocore.export(model, max_bytes=1)
    for _ in range(3 if dist.get_rank() == 1 else 20):
        if next(buckets, None) is None:
            break
    if dist.get_rank() == 1:
        time.sleep(4)
        os._exit(3)


def test_a_rank_that_stops_taking_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STALL_SECONDS, "2")
    outcomes = run_to_end(stop_taking, 2)
    assert outcomes[0].error is not None
    assert "rank 1" in outcomes[0].error and "all_gather of" in outcomes[0].error


class Odd(nn.Module):
    """No optimizer's state, and a unit without parameters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)


def park_odd() -> None:
    torch.manual_seed(0)
    model = zerocore.shard(Odd(), stage=3, units=["Linear"])
    before = exported(model)
    with pytest.raises(KeyError), zerocore.parked(model):
        raise KeyError
    assert_same(exported(model), before)
    with pytest.raises(ValueError, match='to must be "cpu"'), zerocore.parked(model, to="disk"):
        pass


def test_mistakes() -> None:
    run_ranks(park_odd, 2)


def park_behind_backwards() -> None:
    """Gradients are still on their way to the host when a model is parked.

    The thread that takes them there begins with a model's first ones, and is late there.
    """
    for _ in range(20):
        model = zerocore.shard(nn.Linear(8, 8), offload=STATES)
        optimizer = zerocore.optim.AdamW(model.parameters())
        model(torch.ones(4, 8)).square().mean().backward()
        with zerocore.parked(model, optimizer):
            time.sleep(0.002)
        optimizer.step()
        model(torch.ones(4, 8))


def test_gradients_come_to_the_host_before_their_memory_goes() -> None:
    run_ranks(park_behind_backwards, 2)
