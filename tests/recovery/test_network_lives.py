"""Ranks on nodes of their own are lost: the job goes on, with losses as if none had been."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.harness import REPOSITORY
from tests.distributed.nodes import can_make_nodes

FAULTS = ("3/elastic/cut/step/2", "4/peers/stop/load/")


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_nodes(), reason="needs root and network namespaces")
def test_jobs_go_on() -> None:
    """The whole of it is ``python -m tests.recovery.network_lives``."""
    command = [sys.executable, "-m", "tests.recovery.network_lives", "--only", *FAULTS]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(FAULTS)} faults, 0 failed" in ended.stdout
