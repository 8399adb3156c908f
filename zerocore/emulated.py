"""The emulated link: one process plays one rank of N over a modelled network.

A c10d backend named ``"emulated"``, for CPU and CUDA tensors, so zerocore, FSDP2, DDP and DeepSpeed
run on it unchanged. The peers are replicas of this rank, so a training step computes what a single
process computes whose batch every rank sees; only the wire is a model. What is measured on it is
*emulated*, and has to be called so.

``torch.distributed.init_process_group("emulated", rank=0, world_size=64, store=HashStore())`` works
too, with ``pg_options=link("ib400")`` for another link than the default one.
"""

from __future__ import annotations

import atexit
import re
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerocore._C import EmulatedGroup, LinkModel

PRESETS: dict[str, tuple[str, str]] = {
    "nvlink4": ("370GB/s", "20us"),
    "nvlink5": ("740GB/s", "20us"),
    "pcie5": ("28GB/s", "40us"),
    "ib400": ("46GB/s", "35us"),
    "eth100": ("12GB/s", "35us"),
}
"""Bus bandwidth as nccl-tests reports it, and the time of a call that moves nearly nothing.

- ``nvlink4``: 8 H100 on NVSwitch; all-gather reaches 360 to 370 GB/s of the 450 GB/s that a GPU
  has (NVIDIA/nccl-tests issue 326: "exactly what we'd expect").
- ``nvlink5``: 900 GB/s a GPU, scaled by the share that NVLink 4 reaches; point to point 770 GB/s
  were measured on GB200 (Azure/AI-benchmarking-guide issue 7).
- ``pcie5``: 8 GPUs on PCIe 5.0 x16 reach 28 GB/s (NVIDIA/nccl issue 1639); the smallest call of
  8 GPUs on PCIe takes 42 us (NVIDIA/nccl issue 1530).
- ``ib400``: a 400 Gb/s port per GPU, 46 of 50 GB/s, as all-gathers reach it at large sizes; a
  small call over RoCE takes 30 to 35 us (NVIDIA/dgx-spark-playbooks pull request 103).
- ``eth100``: a 100 Gb/s port reaches 12 GB/s (NVIDIA/nccl-tests issue 119); latency as above.
"""

DEFAULT_BANDWIDTH = "450GB/s"
DEFAULT_LATENCY = "12us"
CPU = torch.device("cpu")

_BANDWIDTH_UNITS = {
    "b/s": 1.0, "kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12,
    "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6, "tbit/s": 125e9,
}  # fmt: skip
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def link(
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float | None = None,
    sms: int = 0,
) -> LinkModel:
    """Describes a link.

    A collective of B bytes (of the full tensor) over N ranks lasts latency + B * f / bandwidth;
    f = (N-1)/N for all-gather, reduce-scatter, all-to-all, gather and scatter, twice that for
    all-reduce, 1 for broadcast and reduce: the bus bandwidth of nccl-tests (its PERFORMANCE.md).

    Args:
        bandwidth: bytes per second that a rank sends and receives, as a number or text such as
            ``"450GB/s"``, ``"400Gbit/s"``, ``"inf"``; or the name of a preset (:data:`PRESETS`).
        latency: seconds per call, or text such as ``"12us"``; by default the preset's, or 12 us.
        sms: multiprocessors that a collective keeps busy on a GPU.

    Raises:
        ValueError: not understood, or out of range.
    """
    if bandwidth in PRESETS:
        bandwidth, preset_latency = PRESETS[str(bandwidth)]
        latency = preset_latency if latency is None else latency
    return LinkModel(
        bandwidth=_parse("bandwidth", bandwidth, _BANDWIDTH_UNITS, "'450GB/s'"),
        latency=_parse(
            "latency", DEFAULT_LATENCY if latency is None else latency, _TIME_UNITS, "'12us'"
        ),
        sms=sms,
    )


def _parse(name: str, value: str | float, units: dict[str, float], example: str) -> float:
    """A number in the base unit: as it is, or from text with a unit."""
    if not isinstance(value, str):
        return float(value)
    text = value.strip().lower()
    if text in ("inf", "infinite"):
        return float("inf")
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([a-z/]+)", text)
    if match is None or match[2] not in units:
        expected = f"a number, {example} or 'inf'"
        presets = f" or one of {', '.join(PRESETS)}" if name == "bandwidth" else ""
        raise ValueError(f"{name} must be {expected}{presets}, got {value!r}")
    return float(match[1]) * units[match[2]]


class Emulation:
    """The default process group on an emulated link; leaving the ``with`` block destroys it."""

    def __init__(self, backend: EmulatedGroup) -> None:
        self._backend = backend

    @property
    def link(self) -> LinkModel:
        """The link; what is assigned holds for collectives issued from then on."""
        return self._backend.link

    @link.setter
    def link(self, value: LinkModel) -> None:
        self._backend.link = value

    def close(self) -> None:
        """Destroys all process groups; collectives under way fail. Again, it does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def emulate(
    world_size: int = 64,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float | None = None,
    sms: int = 0,
    *,
    rank: int = 0,
) -> Emulation:
    """Makes this process one rank of ``world_size`` on an emulated link, as the default group.

    Args:
        world_size: number of ranks; all but this one exist only as replicas of it.
        bandwidth: bytes per second, text, or a preset's name; see :func:`link`.
        latency: seconds per call, or text; see :func:`link`.
        sms: multiprocessors that a collective keeps busy on a GPU.
        rank: which rank this process plays.

    Returns:
        A handle that can change the link, and ends the emulation when used as context manager.

    Raises:
        ValueError: an option is out of range, or there is a default group already.
    """
    if dist.is_initialized():
        raise ValueError(
            f"there is a default process group already ({dist.get_backend()}); call "
            "torch.distributed.destroy_process_group() before emulate()"
        )
    chosen = link(bandwidth, latency, sms)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "emulated", rank=rank, world_size=world_size, store=store, pg_options=chosen
    )
    return Emulation(_default_backend())


def _default_backend() -> EmulatedGroup:
    backend = distributed_c10d._get_default_group()._get_backend(CPU)
    if not isinstance(backend, EmulatedGroup):
        raise RuntimeError(
            f"the default group's backend is a {type(backend).__name__}; unset "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps it"
        )
    return backend


def _create(options: Any, chosen: LinkModel | None) -> EmulatedGroup:
    """What torch.distributed calls for each group; subgroups take the default group's link."""
    if chosen is None:
        chosen = _default_group_link() or link()
    if not isinstance(chosen, LinkModel):
        raise TypeError(f"pg_options of 'emulated' must come from link(), got {chosen!r}")
    timeout: timedelta = options.timeout
    return EmulatedGroup(options.group_rank, options.group_size, chosen, timeout.total_seconds())


def _default_group_link() -> LinkModel | None:
    """The link of the default group, if that is emulated."""
    if not dist.is_initialized() or dist.get_backend() != "emulated":
        return None
    return _default_backend().link


def register() -> None:
    """Makes the backend known to torch.distributed; zerocore does it when imported."""
    dist.Backend.register_backend("emulated", _create, extended_api=True, devices=["cpu", "cuda"])
    # Threads of groups that nobody destroyed must end before the interpreter does.
    atexit.register(EmulatedGroup.shut_down_all)
