"""Two real ranks, on one GPU if need be: their losses and parameters are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.ranks import run_ranks, several_ranks_by_nccl

CHECKS = ["collectives_are_made", "parity", "fsdp", "checkpoint", "wires"]


def test_over_gloo(device: torch.device, tmp_path: Path) -> None:
    """Its collectives of CUDA tensors go over the host."""
    run_ranks(CHECKS, 2, "gloo", device, tmp_path)


@pytest.mark.parametrize("backend", ["nccl", "nccl_bound"])
def test_over_nccl(cuda: torch.device, backend: str, tmp_path: Path) -> None:
    env = several_ranks_by_nccl(2)
    if env is None:
        pytest.skip("one GPU, and ZEROCORE_NCCL names no library of NCCL 2.30 or newer")
    run_ranks(CHECKS, 2, backend, cuda, tmp_path, env)
