"""Ranks on nodes of their own that die, stop or lose their cable: the others' processes end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.harness import REPOSITORY
from tests.distributed.network_faults import PATIENCE, START_SECONDS, all_faults
from tests.distributed.nodes import can_make_nodes

# Rank 0 holds the store.
FAULTS = ("stop/save/0", "cut/forward/1", "kill/barrier/0", "stop/load/2", "cut/step/0")

# Opt-in: it times real processes, and was not tried on a loaded machine.
pytestmark = pytest.mark.skipif(
    "ZEROCORE_NETWORK_FAULTS" not in os.environ, reason="ZEROCORE_NETWORK_FAULTS=1 runs it"
)


@pytest.mark.skipif(not can_make_nodes(), reason="needs root and network namespaces")
def test_processes_end_and_say_why() -> None:
    """The whole of it is ``python -m tests.distributed.network_faults``."""
    assert set(FAULTS) <= {str(fault) for fault in all_faults()}
    command = ["-m", "tests.distributed.network_faults", "--at-a-time", str(len(FAULTS))]
    result = subprocess.run(
        [sys.executable, *command, "--only", *FAULTS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + 4 * PATIENCE,
    )
    assert result.returncode == 0, result.stdout + result.stderr
