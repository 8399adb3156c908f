"""Several reads or writes of one rank at a time: one computes checksums while another waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from zerocore.common.cores import host_threads, local_ranks

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST = 8  # one thread moves about 2 GB/s through the page cache: more than a node's disks need


def num_threads() -> int:
    """This rank's share of the cores, from 2 to 8."""
    return min(_MOST, max(2, host_threads(local_ranks())))


def in_threads(call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results of ``call`` for the items, in order; raises the error of one at its turn.

    ``call`` releases the interpreter while it reads or writes. All calls have ended when this ends.
    """
    with ThreadPoolExecutor(num_threads(), "checkpoint-io") as pool:
        yield from pool.map(call, items)
