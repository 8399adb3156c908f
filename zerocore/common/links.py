"""Links between ranks: a model of the time of a collective, and presets with their sources."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerocore.common.quantities import format_nbytes, parse_bandwidth, parse_seconds

# Multiples of the full buffer that a collective moves.
_SHARES = {
    "all_gather": 1.0,
    "gather_near": 1.0,
    "gather_sums": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
}


@dataclass(frozen=True)
class Link:
    """A modelled link.

    Attributes:
        name: its name in tables.
        bandwidth_bytes_per_s: bus bandwidth of a rank, as nccl-tests reports it.
        latency_s: time of a call that moves almost nothing.
        source: the source of the figures.

    Raises:
        ValueError: the bandwidth is not positive, or the latency negative.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                f"link '{self.name}': bandwidth must be positive, got {self.bandwidth_bytes_per_s}"
            )
        if not self.latency_s >= 0:
            raise ValueError(f"link '{self.name}': latency must be 0 or more, got {self.latency_s}")

    def seconds(self, op: str, nbytes: int, world_size: int) -> float:
        """Returns the time of a collective whose full buffer has ``nbytes``.

        The model of nccl-tests (its PERFORMANCE.md): latency + traffic / bandwidth.
        """
        return self.latency_s + traffic_nbytes(op, nbytes, world_size) / self.bandwidth_bytes_per_s


LinkLike = Link | str | float
"""A link, or a text or number that :func:`find_link` converts to one."""


def traffic_nbytes(op: str, nbytes: int, world_size: int) -> float:
    """Returns the bytes that one rank sends for a collective whose full buffer has ``nbytes``:
    (N - 1) / N of it, and twice that for an all-reduce."""
    return _SHARES[op] * nbytes * (world_size - 1) / world_size


_NVLINK4 = "8 H100 on NVSwitch: about 360 of 450 GB/s, NVIDIA/nccl-tests issue 326; 370 is assumed"
_NVLINK5 = "the share of NVLink 4 of 900 GB/s; 770 point to point, Azure/AI-benchmarking-guide 7"
_PCIE5 = "8 GPUs on PCIe 5.0 x16: 28 GB/s, NVIDIA/nccl issue 1639; 42 us, NVIDIA/nccl issue 1530"
_SMALL_CALL = "30 to 35 us a small call over RoCE, NVIDIA/dgx-spark-playbooks pull request 103"
_IB400 = f"a 400 Gb/s port for each GPU, 46 of 50 GB/s is assumed; {_SMALL_CALL}"
_ETH100 = f"100 Gb/s for each GPU, 96 % of it as in NVIDIA/nccl-tests issue 119; {_SMALL_CALL}"

PRESETS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink4", 370e9, 20e-6, _NVLINK4),
        Link("nvlink5", 740e9, 20e-6, _NVLINK5),
        Link("pcie5", 28e9, 40e-6, _PCIE5),
        Link("ib400", 46e9, 35e-6, _IB400),
        Link("eth100", 12e9, 35e-6, _ETH100),
    )
}
"""Links by name; network links count one port per GPU."""


DEFAULT_LATENCY = "12us"
"""The latency of a link that a caller gives only as a bandwidth."""


def find_link(link: LinkLike) -> Link:
    """Returns a link from a preset's name, a bandwidth, or a bandwidth and a latency.

    The latter two are texts, such as ``"450GB/s"``, ``"450GB/s,12us"`` or ``"inf"``; a number is
    bytes per second. The default latency is :data:`DEFAULT_LATENCY`.

    Raises:
        ValueError: another text or a negative number; the message names the presets.
        TypeError: neither text, a number nor a link.
    """
    if isinstance(link, Link):
        return link
    expected = (
        f"one of {', '.join(PRESETS)}, or a bandwidth and a latency such as '450GB/s,12us', got "
        f"{link!r}"
    )
    if isinstance(link, bool) or not isinstance(link, str | int | float):
        raise TypeError(f"link must be a zerocore.planning.Link, {expected}")
    if isinstance(link, str) and link in PRESETS:
        return PRESETS[link]
    try:
        return _parse_link(link)
    except ValueError as error:
        raise ValueError(f"link must be {expected}: {error}") from None


def _parse_link(link: str | float) -> Link:
    if not isinstance(link, str):
        return Link(f"{format_nbytes(link)}/s", float(link), parse_seconds(DEFAULT_LATENCY))
    bandwidth, _, latency = link.partition(",")
    rate = math.inf if bandwidth in ("inf", "infinite") else parse_bandwidth(bandwidth)
    return Link(link, rate, parse_seconds(latency or DEFAULT_LATENCY))
