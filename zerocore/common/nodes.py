"""Machines by name: GPUs, the links in a node and its network ports, with sources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerocore.common.links import PRESETS, Link

MATMUL_SHARE = 0.8
"""Assumed speed of a training step's matrix products, as a share of the best measured product:
shapes differ, clocks are lower under load, and collectives run at the same time."""

MEMORY_SHARE = 0.85
"""Assumed share of the memory's bandwidth that elementwise kernels reach."""

COMPILED_TRAFFIC = 0.4
"""Assumed share of the elementwise kernels' traffic that remains under torch.compile."""

BASE_LATENCY_S, HOP_S, NETWORK_HOP_S = 8.4e-6, 3.4e-6, 9.6e-6
"""A ring of N ranks makes N - 1 hops: NCCL's own model, src/graph/tuning.cc (Ring, Simple)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: its model.
        memory_nbytes: bytes of its memory.
        peak_flops: dense bf16 operations per second, NVIDIA's data sheet.
        fp32_flops: fp32 operations per second without TF32, NVIDIA's data sheet.
        matmul_flops: bf16 operations per second of the best measured matrix product.
        attention_flops: operations per second of fused attention, without the operations that a
            causal mask skips.
        memory_bytes_per_s: bandwidth of its memory, NVIDIA's data sheet.
        source: the source of ``matmul_flops`` and ``attention_flops``.
    """

    name: str
    memory_nbytes: int
    peak_flops: float
    fp32_flops: float
    matmul_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    source: str = ""

    def seconds(self, work: Work, compiled: bool = False) -> float:
        """Returns the time of kernels that run one after the other."""
        traffic = work.moved_nbytes * (COMPILED_TRAFFIC if compiled else 1.0)
        return (
            work.products / (MATMUL_SHARE * self.matmul_flops)
            + work.products_fp32 / (MATMUL_SHARE * self.fp32_flops)
            + work.attention / self.attention_flops
            + traffic / (MEMORY_SHARE * self.memory_bytes_per_s)
        )


@dataclass(frozen=True)
class Work:
    """Operations and bytes of kernels, for :meth:`Gpu.seconds`.

    Attributes:
        products: operations of matrix products and convolutions in 16 bits.
        products_fp32: operations of matrix products and convolutions in fp32.
        attention: operations of fused attention; half of the square if it is causal.
        moved_nbytes: bytes that all other kernels read and write.
    """

    products: int = 0
    products_fp32: int = 0
    attention: int = 0
    moved_nbytes: int = 0


@dataclass(frozen=True)
class Node:
    """A machine of several GPUs with network ports, one node of a cluster.

    Attributes:
        name: such as ``8xH100-ib400``.
        gpu: the kind of its GPUs.
        num_ranks: the number of its GPUs.
        inside: the link between its GPUs.
        port: a network port.
        num_ports: the number of its network ports, which the GPUs share.
    """

    name: str
    gpu: Gpu
    num_ranks: int
    inside: Link
    port: Link
    num_ports: int

    def link(self, num_ranks: int, stride: int = 1) -> Link:
        """Returns the link of a group whose ranks are ``stride`` apart, numbered node by node.

        NCCL makes a ring per port, so a group that fills its nodes has all ports of a node. Groups
        that run at the same time share them.
        """
        if 1 + (num_ranks - 1) * stride <= self.num_ranks:
            return self.inside
        members = max(1, min(num_ranks, self.num_ranks // stride))  # ranks of the group in a node
        share = self.num_ports * members / self.num_ranks
        bandwidth = share * self.port.bandwidth_bytes_per_s
        if members > 1:
            bandwidth = min(bandwidth, self.inside.bandwidth_bytes_per_s)
        network_hops = -(-num_ranks // members) - 1
        hops = num_ranks - 1 - network_hops
        latency = BASE_LATENCY_S + hops * HOP_S + network_hops * NETWORK_HOP_S
        ports = "" if share == 1 else f"{share:g} x "
        latency = max(latency, self.port.latency_s)
        return Link(f"{ports}{self.port.name}", bandwidth, latency, self.port.source)

    def assumptions(self) -> str:
        """Returns a sentence with the figures that predictions on this machine assume."""
        gpu = self.gpu
        return (
            f"{self.name}: {gpu.peak_flops / 1e12:,.4g} TFLOP/s dense bf16 at most, of which "
            f"matrix products reach {MATMUL_SHARE * gpu.matmul_flops / gpu.peak_flops:.0%}, "
            f"attention {gpu.attention_flops / gpu.peak_flops:.0%}; other kernels move "
            f"{MEMORY_SHARE:.0%} of {gpu.memory_bytes_per_s / 1e12:.3g} TB/s; bus bandwidth "
            f"{self.inside.bandwidth_bytes_per_s / 1e9:.3g} GB/s in a node, {self.num_ports} "
            f"ports of {self.port.bandwidth_bytes_per_s / 1e9:.3g} GB/s to the others"
        )


_MEASURED = "best product: mag-/gpu_benchmark; attention: FlashAttention-{} ({})"
_HOPPER = _MEASURED.format(2, "370 TFLOP/s forward on an H100, arXiv:2407.08608; 350 assumed")
_AMPERE = _MEASURED.format(2, "50 to 73 % of the peak, arXiv:2307.08691; 60 % assumed")
_ASSUMED = "assumed: the shares of an {}"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80 * 10**9, 312e12, 19.5e12, 267.9e12, 187e12, 2.04e12, _AMPERE),
        Gpu("H100", 80 * 10**9, 989e12, 67e12, 792.1e12, 350e12, 3.35e12, _HOPPER),
        Gpu("H200", 141 * 10**9, 989e12, 67e12, 792.1e12, 350e12, 4.8e12, _ASSUMED.format("H100")),
        Gpu("B200", 180 * 10**9, 2250e12, 75e12, 1800e12, 800e12, 8e12, _ASSUMED.format("H100")),
        Gpu("L40S", 48 * 10**9, 362e12, 91.6e12, 290e12, 130e12, 0.864e12, _ASSUMED.format("H100")),
    )
}
"""GPUs by name."""

_NVLINK3 = "8 A100 on NVSwitch: NCCL's own model has 235 of 300 GB/s, src/graph/tuning.cc"
_INSIDE = {
    "A100": Link("nvlink3", 235e9, 20e-6, _NVLINK3),
    "H100": PRESETS["nvlink4"],
    "H200": PRESETS["nvlink4"],
    "B200": PRESETS["nvlink5"],
    "L40S": Link("pcie4", 20e9, 40e-6, "PCIe 4.0 x16: 32 GB/s on paper; 20 is assumed"),
}
_NETWORK = {"A100": "ib200", "H100": "ib400", "H200": "ib400", "B200": "ib400", "L40S": "1xeth100"}
_PORT_SHARE = 0.92
_PORT = (
    "a port of {} Gb/s of which 92 % are assumed: 46 to 48 of 50 GB/s, NVIDIA/nccl-tests issue 290"
)
MACHINES = ("8xH100-ib400", "8xH200-ib400", "8xB200-ib400", "8xA100-ib200", "8xL40S-1xeth100")
"""Examples of names for :func:`find_node`."""


def find_node(name: str | Node) -> Node:
    """Returns a machine from its name: GPUs in a node, their model, and the network.

    ``8xH100-ib400`` has 8 H100 and a port of 400 Gb/s for each; ``8xA100-4xeth100`` has 4 ports of
    100 Gb/s in a node. ``H100`` alone means 8 GPUs and the usual network, and so does
    ``l40s-pcie``.

    Raises:
        ValueError: an unknown machine.
        TypeError: neither text nor a node.
    """
    if isinstance(name, Node):
        return name
    expected = f"machine must be such as {', '.join(MACHINES)}, got {name!r}"
    if not isinstance(name, str):
        raise TypeError(expected)
    pattern = r"(?:(\d+)x)?([a-z]+\d+[a-z]?)(?:-(?:pcie|(?:(\d+)x)?(ib|eth|roce)(\d+)))?"
    match = re.fullmatch(pattern, name.strip().lower())
    gpu = GPUS.get(match[2].upper()) if match else None
    if match is None or gpu is None or "0" in (match[1], match[3], match[5]):
        raise ValueError(f"{expected} (GPUs: {', '.join(GPUS)}; networks: ib, roce, eth)")
    num_ranks = int(match[1] or 8)
    if match[4] is None:
        return find_node(f"{num_ranks}x{gpu.name}-{_NETWORK[gpu.name]}")
    num_ports, kind, rate = int(match[3] or num_ranks), match[4], int(match[5])
    port = PRESETS.get(f"{kind}{rate}") or Link(
        f"{kind}{rate}",
        _PORT_SHARE * rate * 0.125e9,
        PRESETS["ib400"].latency_s,
        _PORT.format(rate),
    )
    ports = "" if num_ports == num_ranks else f"{num_ports}x"
    name = f"{num_ranks}x{gpu.name}-{ports}{kind}{rate}"
    return Node(name, gpu, num_ranks, _INSIDE[gpu.name], port, num_ports)


DEFAULT_NODE = find_node("8xH100-ib400")
"""The machine of a plan without one."""
