"""How long ranks may wait for each other, in what, and what one tells when its program ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch.distributed as dist

from zerocore._C import Waiting, note_end, watch_group
from zerocore.common.groups import check_exists
from zerocore.common.patching import around

STALL_SECONDS = "ZEROCORE_STALL_SECONDS"


def stall_seconds() -> float | None:
    """Seconds after which a collective that does not end is an error: 0 for never, None for the
    timeout of the process group. ValueError if the environment variable is no such number."""
    text = os.environ.get(STALL_SECONDS, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{STALL_SECONDS}: expected seconds, 0 or more, got {text!r}")
    return seconds


_operation: ContextVar[str] = ContextVar("operation", default="")


@contextmanager
def operation(name: str) -> Iterator[None]:
    """The name of this thread's work in the alarm's sentences; also a decorator.

    An operation inside of another one is a part of that.
    """
    before = _operation.set(_operation.get() or name)
    try:
        yield
    finally:
        _operation.reset(before)


def waiting(group: dist.ProcessGroup, what: str) -> Waiting:
    """Goes around a collective of the group: the alarm looks after it as after the engine's.

    ``what`` names it where no :func:`operation` does. An error of the collective raises the alarm.
    """
    check_exists(group)
    return Waiting(_operation.get() or what, group.group_name)


def watch(control: dist.ProcessGroup | None) -> None:
    """The alarm of a model has been made: what it also looks after.

    The others are told if this program ends while they wait for it. A rank that waits in a
    collective of the program's own, in the default group, is woken up by the alarm; one in
    ``dist.barrier`` also raises it.
    """
    _watch_end()
    if control is not None and dist.group.WORLD is not None:
        watch_group(dist.group.WORLD.group_name, beside=control.group_name)


@around
def watched_barrier(
    barrier: Any, group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """``torch.distributed.barrier`` of the default group, in which the alarm is raised, too."""
    world = dist.group.WORLD
    has_own_timeout = len(args) > 1 or kwargs.get("timeout") is not None
    if async_op or has_own_timeout or world is None or group not in (None, world):
        return barrier(group, async_op, *args, **kwargs)
    with waiting(world, "torch.distributed.barrier"):
        return barrier(group, async_op, *args, **kwargs)


@cache
def _watch_end() -> None:
    atexit.register(_tell)


def _tell() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    text = "" if error is None else f" after {type(error).__name__}: {error}".split("\n")[0][:200]
    note_end(text)
