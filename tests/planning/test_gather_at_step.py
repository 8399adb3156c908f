"""The plan of a first gather that begins at the optimizer's step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerocore
from zerocore.model.config import Communication, ShardConfig


def make_plan(gather_at_step: bool, world_size: int = 4) -> zerocore.Plan:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return zerocore.plan(
        model,
        world_size,
        inputs=torch.ones(8, 64),
        loss=lambda net, x: net(x).sum(),
        units=[nn.Linear],
        links="1GB/s,0us",
        gather_at_step=gather_at_step,
    )


def test_it_is_hidden_and_sends_as_much() -> None:
    plain, early = make_plan(False), make_plan(True)
    assert "first gather at the step" in str(early) and "at the step" not in str(plain)
    for before, after in zip(plain.stages[:3], early.stages[:3], strict=True):
        assert before == after
    before, after = plain.stages[3], early.stages[3]
    assert (after.num_collectives, after.sent_nbytes) == (
        before.num_collectives,
        before.sent_nbytes,
    )
    assert after.reserved == before.reserved
    early_time, time = after.timings[0], before.timings[0]
    assert early_time.communication_s == pytest.approx(time.communication_s)
    gather_s = 0.75 * (64 * 64 + 64) * 4 / 1e9
    assert time.step_s - early_time.step_s == pytest.approx(gather_s, rel=0.1)


def test_parameters_on_disk_are_refused() -> None:
    offload = zerocore.Offload(states="disk", parameters="disk", path="/tmp")
    with pytest.raises(ValueError, match="gather_at_step=True is not built for parameters on disk"):
        ShardConfig(communication=Communication(gather_at_step=True), offload=offload)
