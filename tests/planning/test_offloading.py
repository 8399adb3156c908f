"""The plan of the host's memory: the least offload that fits, and when it is hidden."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerocore
from zerocore.planning.candidates import call_of
from zerocore.planning.setting import Setting

WIDTH = 256


def planned(memory: int, host_memory: int) -> zerocore.planning.Plan:
    """Of 8 equal layers, each a unit, on 4 ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    return zerocore.plan(
        model,
        4,
        units=list("01234567"),
        machine=zerocore.Machine(memory=memory, host_memory=host_memory),
        workload=zerocore.Workload(inputs=torch.zeros(1, WIDTH), loss=lambda net, x: net(x).sum()),
    )


def test_bytes_leave_the_device_for_the_host() -> None:
    result = planned(1 << 30, 1 << 30)
    by_offload = {(each.stage, call_of(each.offload)): each.memory for each in result.offloads}
    for stage in result.stages:
        states = by_offload[stage.stage, "offload=zerocore.Offload(states='cpu')"]
        assert (states.optimizer, states.host_optimizer) == (0, stage.optimizer)
        assert states.parameters == stage.parameters
        assert states.host_weights == stage.optimizer // 2  # one number where Adam keeps two
    call = "offload=zerocore.Offload(states='cpu', gradients='cpu', parameters='cpu')"
    everything = by_offload[3, call]
    assert everything.model_state == 0
    # Two buffers for gradients that come off the device, of the largest unit, and gaps.
    assert everything.host - everything.host_buffers == result.stages[3].model_state
    assert 0 < everything.host_buffers < everything.host_gradients


def test_the_least_that_fits_is_named() -> None:
    roomy = planned(1 << 30, 1 << 30)
    assert "stage 0 with offload=zerocore.Offload(states='cpu') is the least" in roomy.advice[-1]
    least = min(each.device_nbytes for each in roomy.offloads)
    tight = planned(least, 1 << 30)
    on_host = [each for each in tight.offloads if not each.offload.uses_disk]
    assert [each.fits for each in on_host].count(True) == 1
    assert "stage 3 with offload=zerocore.Offload(states='cpu', gra" in tight.advice[-1]
    # The ranks of a machine share its memory.
    of_rank = on_host[-1].memory.host
    assert "Offload(states='cpu', gra" in planned(least, 4 * of_rank).advice[-1]
    # A disk takes what the host cannot, but for gradients and buffers.
    smaller = planned(least, 4 * of_rank - 4)
    everything = smaller.offloads[-1]
    assert everything.fits and everything.memory.disk > 0
    assert "parameters='disk', path='...') is the least offload that fits" in smaller.advice[-1]
    assert "and a file of " in smaller.advice[-1]
    nothing = planned(least, 4 * everything.memory.host - 4)
    assert "no offload fits" in nothing.advice[-1]


def test_tokens_from_which_an_update_is_hidden() -> None:
    """The parameters cancel: 28 bytes of memory against 6 operations a token."""

    def tokens(world_size: int) -> int:
        machine = zerocore.Machine(host_bandwidth="400GB/s")
        facts = zerocore.Communication(), zerocore.Workload(), machine
        return Setting(world_size, 1, *facts).hiding_tokens

    assert tokens(8) == tokens(64) == 37_333  # 8 ranks are on a machine
    assert tokens(1) == pytest.approx(37_333 / 8, abs=1)
    with pytest.raises(ValueError, match="host_bandwidth"):
        zerocore.Machine(host_memory="1GiB", host_bandwidth=0)
