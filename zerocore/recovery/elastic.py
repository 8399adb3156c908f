"""Training that goes on in the processes that live, when others are lost or come."""

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
    """Other processes wait to join."""


@dataclass
class Life:
    """The time from one meeting of processes to the next; given to the program's function.

    Attributes:
        number: 0 for the first of this process.
    """

    number: int
    _handler: RendezvousHandler
    _has_admitted: bool = False

    @operation("Life.admit")
    def admit(self) -> None:
        """Ends this life on all ranks if processes wait to join; collective.

        Call it behind the ``save`` of a checkpoint: it waits until that is kept, and the next life
        goes on from there.
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
    """Calls ``train`` in a process group of the processes that live, again when some are lost.

    For processes that nobody starts again; under torchrun or Ray Train, which start them again, it
    is not needed. Each process calls it, and meets the others at ``endpoint`` by torch's own
    rendezvous. When an error of a collective says that a rank is lost, ``train`` ends, and those
    that live meet and call it anew, with other rank numbers. It must make model, optimizer and
    :class:`PeerCheckpoints` anew and load: no process imports anything or touches a disk for that.

    Args:
        train: called with a :class:`Life`; its other errors are raised here.
        endpoint: ``"host:port"`` of a ``torch.distributed.TCPStore``. If none is there, the first
            process on that host makes it; if that one is lost, so is the job.
        ranks: the fewest and the most that train.
        backend, timeout: of ``init_process_group``.
        max_restarts: the error is raised after so many lives in a row that were lost before their
            first :meth:`Life.admit`: a mistake in the program would restart them for ever.
        job: a name that no other job at ``endpoint`` has.
        rendezvous: options of torch's ``c10d`` rendezvous, such as ``last_call_timeout``: seconds
            to wait for more ranks when the fewest are there.

    Raises:
        RendezvousTimeoutError: too few processes live.
        ValueError: ``ranks`` are no bounds.
    """
    fewest, most = ranks
    if not 0 < fewest <= most:
        raise ValueError(f"ranks: expected (fewest, most), got {ranks}")
    handler = get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, job, fewest, most, **rendezvous)
    )
    number, num_lost = 0, 0.0
    while True:
        met = handler.next_rendezvous()
        if met.rank == 0:
            # Processes that join wait for this; torch's own rank 0 gives it once only.
            RendezvousStoreInfo.build(0, met.store, local_addr=None, server_port=1)
        life = Life(number, handler)
        try:
            dist.init_process_group(
                backend, timeout=timeout, store=met.store, rank=met.rank, world_size=met.world_size
            )
            done = train(life)
            dist.barrier()  # one that is lost shortly before the end is replaced
            handler.shutdown()
            return done
        except (_Regroup, RuntimeError) as error:
            num_lost = _lost_in_a_row(num_lost, life, error)
            if num_lost > max_restarts:
                raise
            _log.warning("%d ranks meet again: %s", met.world_size, error)
        finally:
            # Behind the except clause, so that no traceback holds the model of this life.
            finish_writes()
            gc.collect()
            if dist.is_initialized():  # a rank may be lost between the meeting and the group
                dist.destroy_process_group()
        number += 1


def _lost_in_a_row(before: float, life: Life, error: BaseException) -> float:
    """Lives that lost a rank before anything was kept; infinitely many if no rank was lost."""
    if isinstance(error, _Regroup):
        return 0
    if not _says_lost(error):
        return math.inf
    return 1 if life._has_admitted else before + 1


def _says_lost(error: BaseException) -> bool:
    """Whether an error comes of a rank that is gone: the alarm's, or gloo's transport's in a
    program's own collective, which has no class. Messages of unequal sizes fail a check there."""
    text = str(error)
    of_transport = "gloo/transport" in text and "enforce fail" not in text
    return isinstance(error, dist.DistError) or of_transport
