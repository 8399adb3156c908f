"""A rank that dies: the others end with an error that says where, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_to_end
from tests.distributed.training import accumulate, case_named

GROUP_TIMEOUT = 6.0
MARGIN = 4.0  # for a machine that is busy


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_forward(module: nn.Module, args: Any, output: Any) -> None:
    die()


def die_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(die)


HOOKS = {"forward": die_in_forward, "backward": die_in_backward}


def lose_a_rank(stage: int, phase: str) -> tuple[str, float, int]:
    """A survivor's error, after how many seconds it came, and its process."""
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    if dist.get_rank() == 1:
        model.get_submodule("blocks.1").register_forward_hook(HOOKS[phase])
    start = time.monotonic()
    try:
        accumulate(model, case, 1)
    except Exception as error:
        return str(error), time.monotonic() - start, os.getpid()
    raise AssertionError("the step went on without rank 1")


@pytest.mark.one_by_day
@pytest.mark.parametrize("phase", HOOKS)
def test_survivors_say_where_they_were(stage: int, phase: str) -> None:
    outcomes = run_to_end(lose_a_rank, 3, stage, phase, group_timeout=GROUP_TIMEOUT)
    assert outcomes[1].error and "exit code -9" in outcomes[1].error
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.error is None, survivor.error
        message, seconds, process = survivor.value
        assert any(op in message for op in ("all_gather", "reduce_scatter", "all_reduce")), message
        places = ("embed", "blocks.", "norm", "head", "the calls of a pass")
        assert any(place in message for place in places), message
        assert seconds < GROUP_TIMEOUT + MARGIN
        assert_gone(process)


def assert_gone(process: int) -> None:
    """Neither running nor a zombie."""
    deadline = time.monotonic() + MARGIN
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} is still there")
