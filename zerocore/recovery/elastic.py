"""Continues training in the remaining processes when others are lost or join."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from zerocore.checkpoint.commit.writer import finish_writes
from zerocore.common.agreement import highest
from zerocore.common.alarm import operation

T = TypeVar("T")
_log = logging.getLogger("zerocore")


class _Regroup(Exception):
    """Raised if other processes wait to join."""


@dataclass
class Life:
    """The time from one rendezvous to the next, an argument of the program's function.

    Attributes:
        number: counts this process's lives from 0.
    """

    number: int
    _handler: RendezvousHandler
    _has_admitted: bool = False

    @operation("Life.admit")
    def admit(self) -> None:
        """Ends this life on all ranks if processes wait to join; collective.

        Call it after a checkpoint's ``save``: it waits until the save is complete, and the next
        life continues from there.
        """
        assert dist.group.WORLD is not None
        (num_waiting,) = highest([dist.group.WORLD], [self._handler.num_nodes_waiting()], None)
        self._has_admitted = True
        if num_waiting > 0:
            finish_writes()
            raise _Regroup(f"{num_waiting} processes join")


def run_elastic(
    train: Callable[[Life], T],
    endpoint: str,
    ranks: tuple[int, int],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    max_restarts: int = 3,
    job: str = "zerocore",
    **rendezvous: Any,
) -> T:
    """Calls ``train`` in a process group, and again in the remaining processes if some are lost.

    Use it if no launcher restarts processes; torchrun and Ray Train do. Each process calls it, and
    meets the others at ``endpoint`` by torch's rendezvous. When an error of a collective says that
    a rank is lost, ``train`` ends. The remaining processes then meet and call it again, with other
    rank numbers. ``train`` must make model, optimizer and :class:`PeerCheckpoints` again and load.
    For this, no process imports anything or touches a disk.

    Args:
        train: called with a :class:`Life`. Its errors are raised here unless a rank is lost.
        endpoint: ``"host:port"`` of a ``torch.distributed.TCPStore``. If there is none, the first
            process on that host makes it; if that process is lost, so is the job.
        ranks: the fewest and the most ranks that train.
        backend, timeout: as for ``init_process_group``.
        max_restarts: number of lives in a row that may lose a rank before their first
            :meth:`Life.admit`; then the error is raised, as the program may be the cause.
        job: a name; other jobs at ``endpoint`` must have other names.
        rendezvous: options of torch's ``c10d`` rendezvous, such as ``last_call_timeout``: seconds
            to wait for more ranks when the fewest have come.

    Raises:
        RendezvousTimeoutError: fewer processes have come than the fewest in ``ranks``.
        ValueError: ``ranks`` is not a valid range.
    """
    fewest, most = ranks
    if not 0 < fewest <= most:
        raise ValueError(f"ranks: expected (fewest, most) with 1 <= fewest <= most, got {ranks}")
    handler = get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, job, fewest, most, **rendezvous)
    )
    number, num_lost = 0, 0.0
    while True:
        met = handler.next_rendezvous()
        if met.rank == 0:
            # Joining processes wait for this key, which torch's own rank 0 sets only once.
            RendezvousStoreInfo.build(0, met.store, local_addr=None, server_port=1)
        life = Life(number, handler)
        try:
            dist.init_process_group(
                backend, timeout=timeout, store=met.store, rank=met.rank, world_size=met.world_size
            )
            done = train(life)
            dist.barrier()  # a rank that is lost just before the end is replaced
            handler.shutdown()
            return done
        except (_Regroup, RuntimeError) as error:
            num_lost = _lost_in_a_row(num_lost, life, error)
            if num_lost > max_restarts:
                raise
            _log.warning("%d ranks meet again: %s", met.world_size, error)
        finally:
            # After the except clause, so that no traceback keeps this life's model alive.
            finish_writes()
            gc.collect()
            if dist.is_initialized():  # a rank may be lost before there is a group
                dist.destroy_process_group()
        number += 1


def _lost_in_a_row(before: float, life: Life, error: BaseException) -> float:
    """Counts lives in a row that lost a rank before an admit; infinity if no rank was lost."""
    if isinstance(error, _Regroup):
        return 0
    if not _says_lost(error):
        return math.inf
    return 1 if life._has_admitted else before + 1


def _says_lost(error: BaseException) -> bool:
    """Whether an error means a lost rank. The alarm's errors do, and so do errors of gloo's
    transport in a program's own collective, which have no class. Gloo's failed checks do not."""
    text = str(error)
    of_transport = "gloo/transport" in text and "enforce fail" not in text
    return isinstance(error, dist.DistError) or of_transport
