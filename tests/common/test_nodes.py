"""Machines by name: the links of groups that fill their nodes, share them or stay inside."""

from __future__ import annotations

import pytest

from zerocore.common.links import PRESETS
from zerocore.common.nodes import (
    BASE_LATENCY_S,
    GPUS,
    HOP_S,
    MACHINES,
    MATMUL_SHARE,
    MEMORY_SHARE,
    NETWORK_HOP_S,
    Work,
    find_node,
)

GB = 1e9


@pytest.mark.parametrize(
    ("text", "name", "ports"),
    [
        *((name, name, 1 if "1x" in name else 8) for name in MACHINES),
        ("h100", "8xH100-ib400", 8),
        ("4xa100", "4xA100-ib200", 4),
        ("l40s-pcie", "8xL40S-1xeth100", 1),
        ("8xA100-4xeth100", "8xA100-4xeth100", 4),
        ("8xB200-roce800", "8xB200-roce800", 8),
    ],
)
def test_names(text: str, name: str, ports: int) -> None:
    node = find_node(text)
    assert (node.name, node.num_ports) == (name, ports)
    assert find_node(node.name) == node
    assert find_node(node) is node
    assert node.gpu.source and node.port.source and node.inside.source


@pytest.mark.parametrize("wrong", ["", "8x", "8xV9-ib400", "8xH100-token5", "0xH100", "H100-ib0"])
def test_what_is_no_machine_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"machine must be such as 8xH100-ib400.*GPUs: A100, H100"):
        find_node(wrong)
    with pytest.raises(TypeError, match="machine must be such as"):
        find_node(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "num_ranks", "stride", "name", "bandwidth"),
    [
        ("8xH100-ib400", 8, 1, "nvlink4", 370),
        ("8xH100-ib400", 64, 1, "8 x ib400", 8 * 46),
        ("8xH100-ib800", 64, 1, "8 x ib800", 370),  # no faster than the links inside
        ("8xH100-ib400", 8, 8, "ib400", 46),  # one GPU of each node, 8 such groups at a time
        ("8xH100-ib400", 16, 4, "2 x ib400", 92),
        ("8xH100-ib400", 2, 4, "nvlink4", 370),
        ("8xA100-4xeth100", 16, 1, "4 x eth100", 48),
        ("8xA100-4xeth100", 2, 8, "0.5 x eth100", 6),
    ],
)
def test_a_group_has_the_ports_of_its_gpus(
    machine: str, num_ranks: int, stride: int, name: str, bandwidth: float
) -> None:
    link = find_node(machine).link(num_ranks, stride)
    assert link.name == name
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth * GB)


def test_latency_grows_with_the_ring() -> None:
    node = find_node("8xH100-ib400")
    ring = node.link(64)  # 63 hops, 7 of them between nodes
    assert ring.latency_s == pytest.approx(BASE_LATENCY_S + 56 * HOP_S + 7 * NETWORK_HOP_S)
    assert node.link(2, 8).latency_s == PRESETS["ib400"].latency_s


def test_time_of_kernels() -> None:
    gpu = GPUS["H100"]
    seconds = {
        Work(products=int(gpu.matmul_flops)): 1 / MATMUL_SHARE,
        Work(products_fp32=int(gpu.fp32_flops)): 1 / MATMUL_SHARE,
        Work(attention=int(gpu.attention_flops)): 1.0,
        Work(moved_nbytes=int(gpu.memory_bytes_per_s)): 1 / MEMORY_SHARE,
    }
    for work, expected in seconds.items():
        assert gpu.seconds(work) == pytest.approx(expected)
    moved = Work(moved_nbytes=10**9)
    assert gpu.seconds(moved, compiled=True) < gpu.seconds(moved)
