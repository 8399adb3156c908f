"""The grid that tests on real ranks run over."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import find_free_port, idle_processes

STAGES = (0, 1, 2, 3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and those of them that `make test` leaves out."""
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    for item in own:
        item.add_marker("distributed")
    for item in left_out(own):
        item.add_marker("nightly")


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Where all stages meet all values of others: but for stage 3 and, in turn, another one."""
    grids: dict[str, dict[str, dict[int, pytest.Item]]] = defaultdict(dict)
    for item in items:
        values = dict(getattr(getattr(item, "callspec", None), "params", {}))
        if isinstance(stage := values.pop("stage", None), int):
            row = grids[item.nodeid.partition("[")[0]].setdefault(repr(sorted(values.items())), {})
            row[stage] = item
    rows = [
        (number, row)
        for grid in grids.values()
        for number, row in enumerate(grid.values())
        if len(grid) > 1 and tuple(sorted(row)) == STAGES
    ]
    return [
        item for number, row in rows for stage, item in row.items() if stage not in (number % 3, 3)
    ]


@pytest.fixture(params=(1, 2, 3, 4), ids=lambda size: f"ranks{size}")
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


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    return find_free_port()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Every test ends the processes that it started."""
    yield
    assert set(multiprocessing.active_children()) <= idle_processes()
