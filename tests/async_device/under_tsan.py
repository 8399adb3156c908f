"""Trains two ranks at every stage on the device, for ThreadSanitizer to watch: `make tsan`."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import zerocore
from tests.async_device.test_backward_threads import HostBlock, host_model
from tests.async_device.training import Block, make_model, start, train
from tests.distributed.harness import find_free_port

NUM_RANKS = 2


def train_stages() -> None:
    """Trains at every stage with delays, recorded events and the steps' report."""
    device, extension = start(on_device=True)
    extension.set_delays(dist.get_rank(), 0.2, 500)
    for stage in range(4):
        model = zerocore.shard(make_model(device), stage=stage, units=[Block])
        train(model, device, steps=2)
        with zerocore.reporting.record_events(model):
            losses = train(model, device, steps=2)
        assert all(loss.isfinite() for loss in losses)
        zerocore.report(model)
        del model
    train(zerocore.shard(host_model(device), units=[HostBlock]), torch.device("cpu"), steps=2)
    extension.synchronize()
    dist.destroy_process_group()


def main() -> int:
    """Starts the ranks and returns the worst exit code."""
    common = {**os.environ, "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(NUM_RANKS)}
    command = [sys.executable, "-m", "tests.async_device.under_tsan"]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(NUM_RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_stages()
    else:
        sys.exit(main())
