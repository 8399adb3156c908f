"""Ray Train starts workers again behind one that is lost; no disk is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.recovery import lives
from tests.repository.test_cluster import started
from tests.repository.test_examples import rank_environment

WORLD_SIZE = 3
# Each worker at two points; one in a load would be behind another fault.
FAULTS = [(point, number % WORLD_SIZE) for number, point in enumerate(lives.POINTS[:-1])]


@pytest.mark.nightly  # Ray takes seconds to start and to notice
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_worker_is_lost_with_its_node(tmp_path: Path) -> None:
    """At each point one of three workers: losses are those of a life in which nobody is lost."""
    pytest.importorskip("ray.train.torch")
    expected = run_ranks(lives.undisturbed, WORLD_SIZE, tmp_path, False)
    names = [f"{point}/{victim}" for point, victim in FAULTS]
    command = [sys.executable, "-m", "tests.recovery.ray_lives", tmp_path, *names]
    env = rank_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    with started([command], tmp_path, env) as (process,):
        assert process.wait(1100) == 0, (tmp_path / "log0").read_text()[-5000:]
    for point, victim in FAULTS:
        for rank in range(WORLD_SIZE):
            path = tmp_path / f"{point}{victim}" / f"life{rank}"
            begin, losses = json.loads(path.read_text())
            assert begin in (2, 4), (point, victim, begin)
            assert losses == expected[rank][begin:], (point, victim, rank)
