"""The grid that tests on real ranks run over."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.by_night import STAGES, WORLD_SIZES
from tests.distributed.harness import idle_processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("distributed")


@pytest.fixture(params=WORLD_SIZES, ids=lambda size: f"ranks{size}")
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks."""
    return int(request.param)


@pytest.fixture(params=STAGES, ids=lambda stage: f"stage{stage}")
def stage(request: pytest.FixtureRequest) -> int:
    """ZeRO stage."""
    return int(request.param)


@pytest.fixture(autouse=True)
def needs_transformers(request: pytest.FixtureRequest) -> None:
    """Cases of the zoo whose name begins with hf_ are skipped where there is no transformers."""
    call = getattr(request.node, "callspec", None)
    names = [] if call is None else [str(value) for value in call.params.values()]
    if any(name.startswith("hf_") for name in names):
        pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Every test ends the processes that it started."""
    yield
    assert set(multiprocessing.active_children()) <= idle_processes()
