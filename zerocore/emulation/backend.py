"""The c10d backend ``"emulated"``, on which one process plays one rank of N.

It takes CPU and CUDA tensors, so zerocore, FSDP2 and DDP run on it unchanged. The other ranks are
mirrors of this one: a training step computes the same as if every rank got the same batch. Only
the times of collectives come from a model, so call a time that is measured on it *emulated*.

``torch.distributed.init_process_group("emulated", rank=0, world_size=64, store=HashStore())`` works
too, with ``pg_options=link("ib400")`` for another link than the default one.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerocore._C import EmulatedGroup, LinkModel
from zerocore.common.checks import check_int
from zerocore.common.links import Link, find_link
from zerocore.common.nodes import DEFAULT_NODE
from zerocore.common.quantities import parse_seconds

CPU = torch.device("cpu")


def link(
    bandwidth: Link | str | float = "nvlink4", latency: str | float | None = None, sms: int = 0
) -> LinkModel:
    """Describes a link.

    A collective of B bytes (of the full tensor) over N ranks lasts latency + B * f / bandwidth;
    f = (N-1)/N for all-gather, reduce-scatter, all-to-all, gather and scatter, twice that for
    all-reduce, 1 for broadcast and reduce. The bandwidth is nccl-tests' bus bandwidth (see its
    PERFORMANCE.md).

    Args:
        bandwidth: a link as for :func:`zerocore.plan`: a preset's name
            (:data:`zerocore.common.links.PRESETS`); the bytes that a rank sends and receives in a
            second, as a number or text such as ``"450GB/s"``, ``"400Gbit/s"``, ``"inf"``; both as
            ``"450GB/s,12us"``; or a :class:`zerocore.planning.Link`.
        latency: seconds per call, or text such as ``"12us"``, instead of the link's own.
        sms: multiprocessors that a collective keeps busy on a GPU.

    Raises:
        ValueError: an option cannot be parsed, or is out of range.
        TypeError: an option has a wrong type.
    """
    check_int("sms", sms, 0)
    chosen = find_link(bandwidth)
    return LinkModel(
        bandwidth=chosen.bandwidth_bytes_per_s,
        latency=chosen.latency_s if latency is None else parse_seconds(latency),
        sms=sms,
    )


class Emulation:
    """The default process group on an emulated link; the end of ``with`` destroys it."""

    def __init__(self, backend: EmulatedGroup) -> None:
        self._backend = backend

    @property
    def link(self) -> LinkModel:
        """The link; a new one applies to collectives issued after it is set."""
        return self._backend.link

    @link.setter
    def link(self, value: LinkModel) -> None:
        self._backend.link = value

    def set_group_link(self, group: dist.ProcessGroup, link: LinkModel) -> None:
        """Gives a group, such as a mesh dimension's ``mesh.get_group(0)``, a link of its own.

        The link applies to collectives issued afterwards. Before, a group has the link that the
        default group had when the group was made. Each group has a queue of its own for its
        collectives.

        Raises:
            ValueError: the group is not on an emulated link.
            TypeError: ``group`` is not a process group, or ``link`` not a result of :func:`link`.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group, such as mesh.get_group(0), got {group!r}"
            )
        _backend_of(group).link = link

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that this process has waited for collectives on the CPU so far."""
        return self._backend.waited_ns()

    def close(self) -> None:
        """Destroys all process groups, if there are any; collectives in flight fail."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def emulate(
    world_size: int = 64,
    bandwidth: Link | str | float | None = None,
    latency: str | float | None = None,
    sms: int = 0,
    *,
    rank: int = 0,
) -> Emulation:
    """Makes this process one rank of ``world_size`` on an emulated link, as the default group.

    Args:
        world_size: number of ranks; all but this one exist only as mirrors of it.
        bandwidth: a link as for :func:`link`; by default, as in :func:`zerocore.plan`, the link of
            nodes with 8 H100.
        latency: seconds per call, or text; see :func:`link`.
        sms: multiprocessors that a collective keeps busy on a GPU.
        rank: the rank that this process plays.

    Returns:
        A handle that can change the link. As a context manager it ends the emulation.

    Raises:
        ValueError: an option is out of range, or there is a default group already.
        TypeError: an option has a wrong type.
    """
    check_int("world_size", world_size, 1)
    check_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
    if dist.is_initialized():
        raise ValueError(
            f"there is a default process group already ({dist.get_backend()}); call "
            "torch.distributed.destroy_process_group() before emulate()"
        )
    chosen = link(DEFAULT_NODE.link(world_size) if bandwidth is None else bandwidth, latency, sms)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "emulated", rank=rank, world_size=world_size, store=store, pg_options=chosen
    )
    return Emulation(_backend_of(distributed_c10d._get_default_group()))


def _backend_of(group: dist.ProcessGroup) -> EmulatedGroup:
    backend = group._get_backend(CPU)
    if not isinstance(backend, EmulatedGroup):
        raise ValueError(
            f"the backend of group '{group.group_name}' is a {type(backend).__name__}, not "
            "emulated; if TORCH_DISTRIBUTED_DEBUG=DETAIL is set, which wraps it, unset it"
        )
    return backend


def make_group(options: Any, chosen: LinkModel | EmulatedGroup | None) -> EmulatedGroup:
    """Makes a group's backend for torch.distributed. Subgroups take the default group's link model.
    If ``chosen`` is a group, makes another communicator of its ranks over the same link."""
    _end_with_process()
    if isinstance(chosen, EmulatedGroup):
        return chosen.beside()
    if chosen is None and dist.is_initialized() and dist.get_backend() == "emulated":
        chosen = _backend_of(distributed_c10d._get_default_group()).link
    elif chosen is None:
        chosen = link(DEFAULT_NODE.link(options.group_size))
    if not isinstance(chosen, LinkModel):
        raise TypeError(f"pg_options of 'emulated' must come from link(), got {chosen!r}")
    timeout: timedelta = options.timeout
    return EmulatedGroup(options.group_rank, options.group_size, chosen, timeout.total_seconds())


@cache
def _end_with_process() -> None:
    """Ends the threads of groups that still exist before the interpreter ends."""
    atexit.register(EmulatedGroup.shut_down_all)
