"""The device that the tests of this folder run on; without one they skip.

`pytest tests/gpu --rehearse` runs on the CPU what does not depend on CUDA itself. It shows that the
tests are right, nothing about a GPU. tests/conftest.py has the option.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerocore._C import HAS_CUDA_KERNELS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture
def cuda() -> torch.device:
    """The first GPU, for tests of what only CUDA has."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if not HAS_CUDA_KERNELS:
        pytest.skip("this build of zerocore has no CUDA code; build it where nvcc is on PATH")
    return torch.device("cuda", 0)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first GPU, or the CPU in a rehearsal."""
    if request.config.getoption("--rehearse", default=False) and not torch.cuda.is_available():
        return torch.device("cpu")
    found: torch.device = request.getfixturevalue("cuda")
    return found


@pytest.fixture(params=range(4), ids=lambda stage: f"stage{stage}")
def stage(request: pytest.FixtureRequest) -> int:
    """ZeRO stage."""
    return int(request.param)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """No process group, no debug mode and no garbage reaches the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.cuda.is_available():  # else it was skipped: hundreds of collections take minutes
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        gc.collect()
