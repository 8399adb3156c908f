"""How the tests are scheduled, the grid that tests on real ranks run over, and how they end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress

import pytest

from tests.by_night import STAGES, WORLD_SIZES, left_out

# Read when OpenMP is loaded, with torch: threads that wait for each other sleep. More of them than
# there are cores would else spin until the time slice of the one that they wait for comes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

STARTS_RANKS = {"run_ranks", "run_to_end", "run_program"}  # functions of tests.distributed


def pytest_configure() -> None:
    """Small blocks are units, as large ones are.

    Processes that wake up do not preempt others: collectives take a fraction of the time.

    With more ranks than cores, a rank is else preempted in the moment it sends, holding the lock
    that gloo's own thread then spins on for a time slice. All processes of a test inherit this.
    """
    from zerocore.model import units  # loads torch, for which the environment is set above

    units.JOINED_NBYTES = 0
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(PermissionError):  # some sandboxes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: some tests wait for time limits and for each other."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """For a second run of the tests, on another build or version of torch."""
    parser.addoption(
        "--one-each",
        action="store_true",
        help="run only the last set of parameters of each test, as a rule stage 3",
    )
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="where there is no GPU, run tests/gpu on the CPU as far as it goes",
    )


def has_gpu() -> bool:
    """All stages of tests/gpu run there."""
    import torch  # behind pytest_configure

    return bool(torch.cuda.is_available())


@pytest.hookimpl(wrapper=True)  # --one-each chooses among those that -m has left
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Marks tests that start ranks. Files with a slow test come first: the last end together."""
    rehearses = config.getoption("--rehearse") and not has_gpu()
    for item in items:
        code = getattr(getattr(item, "function", None), "__code__", None)
        if code is not None and STARTS_RANKS & set(code.co_names):
            item.add_marker("distributed")
    for item in left_out(item for item in items if rehearses or "gpu" not in item.path.parts):
        item.add_marker("nightly")
    yield
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("--one-each"):
        kept = set({item.nodeid.partition("[")[0]: item for item in items}.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Leaves what is imported by now out of the collections of garbage that tests cause."""
    gc.collect()
    gc.freeze()


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
    harness = sys.modules.get("tests.distributed.harness")
    if harness is not None:
        assert set(multiprocessing.active_children()) <= harness.idle_processes()
