"""Engines that stand in for a device with streams; a test file asks for them with `pytestmark`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.engine.graphs import Mesh
from zerocore import _C
from zerocore.sharding import builder


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=1, world_size=6, store=FakeStore())
    yield Mesh()
    dist.destroy_process_group()


@pytest.fixture
def log_hand_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines stand in for a device with streams and log what they would do."""
    monkeypatch.setattr(builder, "EngineOptions", partial(_C.EngineOptions, log_hand_overs=True))
