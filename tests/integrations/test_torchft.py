"""Replica groups of torchft, of which one is lost and heals from the other's snapshot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import find_free_port
from tests.repository.test_examples import rank_environment


def start(address: str, group: int, last: int, folder: Path) -> list[subprocess.Popen[str]]:
    """The ranks of a group, of which the second ends in a step."""
    port, ranks = find_free_port(), []
    for rank in range(2):
        words = ["-m", "tests.integrations.replica_groups", address, group, rank, port]
        words.append(last if rank == 1 else 0)
        with open(folder / f"group{group}-rank{rank}-last{last}", "w") as log:
            command = [sys.executable, *map(str, words)]
            ranks.append(
                subprocess.Popen(command, env=rank_environment(), stdout=log, stderr=log, text=True)
            )
    return ranks


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_group_that_is_lost_heals_from_the_other(tmp_path: Path) -> None:
    coordination: Any = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    ranks = []
    try:
        ranks += start(lighthouse.address(), 0, 0, tmp_path)
        lost = start(lighthouse.address(), 1, 4, tmp_path)
        ranks += lost
        codes = [rank.wait(100) for rank in lost]
        assert codes[1] == -9 and codes[0] != 0, codes
        healed = start(lighthouse.address(), 1, 0, tmp_path)
        ranks += healed
        assert [rank.wait(150) for rank in (*ranks[:2], *healed)] == [0] * 4, tmp_path
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        lighthouse.shutdown()
    logs = [tmp_path / f"group{group}-rank{rank}-last0" for group in (0, 1) for rank in (0, 1)]
    found = [re.search(r"began (\d+) of 2 groups, ended at (.*)", log.read_text()) for log in logs]
    begins = [int(each.group(1)) for each in found if each]
    assert begins[0] == begins[1] <= 4 < begins[2] == begins[3], begins
    ends = [each.group(2) for each in found if each]
    assert ends[:2] == ends[2:], ends
