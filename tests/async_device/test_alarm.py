"""The alarm on a device whose collectives do not block the host: a waiting host is woken up."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

import zerocore
from tests.async_device.training import Block, make_model, start, train
from tests.distributed.harness import run_to_end
from zerocore.common.alarm import STALL_SECONDS

LIMIT = 3.0
PATIENCE = 12.0


def lose_the_other_rank() -> tuple[str, float]:
    """Returns the error of the rank that goes on, and the seconds until it came."""
    os.environ[STALL_SECONDS] = str(LIMIT)
    device, _ = start(True)
    model = zerocore.shard(make_model(device), stage=1, units=[Block])
    train(model, device)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        train(model, device)
    return str(error.value), time.monotonic() - begun


@pytest.mark.nightly
def test_a_host_that_waits_for_a_stopped_rank() -> None:
    survivor, _ = run_to_end(lose_the_other_rank, 2, launch="torchrun", timeout=60.0)
    assert survivor.error is None, survivor.error
    message, seconds = survivor.value
    assert "rank 0 waits in all_reduce of 'the calls of a pass'" in message
    assert "rank 1 did not answer" in message
    assert seconds < LIMIT + PATIENCE
