"""Runs ranks on nodes: network namespaces with limited links between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench.lib.systems import import_zerocore


def nodes_class() -> Any:
    """Returns `tests.distributed.nodes.Nodes`; prints why and returns None if there are none."""
    import_zerocore()  # also finds the tests, which can make nodes
    from tests.distributed.nodes import Nodes, can_make_nodes

    if can_make_nodes():
        return Nodes
    print("skipped: network namespaces need root, and Linux with ip and tc")
    return None


def run_on_nodes(
    nodes: Any, arguments: list[str], port: int, timeout_s: float, ranks_a_node: int = 1
) -> Any:
    """Runs `python *arguments` as ranks of a gloo group; returns the JSON in rank 0's last line.

    `nodes`: a `tests.distributed.nodes.Nodes`; `port`: a free one of the first node. Raises
    RuntimeError if a rank fails, subprocess.TimeoutExpired after `timeout_s` s; kills all ranks.
    """
    ranks = []
    count = len(nodes.names) * ranks_a_node
    try:
        for rank in range(count):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": nodes.address(0),
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(count),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % ranks_a_node),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            node = nodes.names[rank // ranks_a_node]
            command = ["ip", "netns", "exec", node, sys.executable, *arguments]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        texts = [each.communicate(timeout=timeout_s)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"ranks ended with {[each.returncode for each in ranks]}")
    return json.loads(texts[0].splitlines()[-1])
