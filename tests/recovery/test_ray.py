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
# Each worker at two points in each way; one in a load would be behind another fault.
FAULTS = [
    f"{kind}/{point}/{(number + turn) % WORLD_SIZE}"
    for turn, kind in enumerate(("KILL", "STOP"))
    for number, point in enumerate(lives.POINTS[:-1])
]


@pytest.mark.nightly  # Ray takes seconds to start and to notice
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_is_lost_with_its_node(tmp_path: Path) -> None:
    """At each point one of three workers, killed or stopped: losses are those of a life in which
    nobody is lost."""
    pytest.importorskip("ray.train.torch")
    expected = run_ranks(lives.undisturbed, WORLD_SIZE, tmp_path, False)
    command = [sys.executable, "-m", "tests.recovery.ray_lives", tmp_path, *FAULTS]
    env = rank_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    with started([command], tmp_path, env) as (process,):
        assert process.wait(1700) == 0, (tmp_path / "log0").read_text()[-5000:]
    for fault in FAULTS:
        for rank in range(WORLD_SIZE):
            begin, losses = json.loads((tmp_path / fault / f"life{rank}").read_text())
            assert begin in (2, 4), (fault, begin)
            assert losses == expected[rank][begin:], (fault, rank)
