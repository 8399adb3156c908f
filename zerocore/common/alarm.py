"""The alarm's Python side: how long ranks may wait, in which operation, and a note at exit."""

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
    """Returns the seconds after which a collective that has not ended is an error: 0 for never,
    None for the process group's timeout. ValueError if the environment variable is not a number."""
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


_operation: ContextVar[tuple[str, str]] = ContextVar("operation", default=("", ""))


@contextmanager
def operation(name: str, place: str = "") -> Iterator[None]:
    """Names this thread's work in the alarm's messages; also a decorator.

    ``place`` follows the name in messages; it may differ between ranks. An operation inside another
    one keeps the outer name.
    """
    token = _operation.set(_operation.get() if _operation.get()[0] else (name, place))
    try:
        yield
    finally:
        _operation.reset(token)


def waiting(group: dist.ProcessGroup, what: str) -> Waiting:
    """Returns a context for a collective: the alarm watches it like the engine's collectives.

    ``what`` is equal on all ranks that issue the collective; on gloo, they compare it first. It
    names the collective outside an :func:`operation`. If ranks differ, or if the collective fails,
    the alarm is set off.
    """
    check_exists(group)
    name, place = _operation.get()
    return Waiting(name + place or what, f"{name}: {what}", group.group_name)


def watch(control: dist.ProcessGroup | None) -> None:
    """Extends a model's alarm to the default group, and to the end of this program.

    Other ranks are told if this program ends while they wait for it. The alarm wakes a rank that
    waits in the program's own collective in the default group; in ``dist.barrier`` the rank also
    raises the alarm's error.
    """
    _watch_end()
    if control is not None and dist.group.WORLD is not None:
        watch_group(dist.group.WORLD.group_name, beside=control.group_name)


@around
def watched_barrier(
    barrier: Any, group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``torch.distributed.barrier``: in the default group, it raises the alarm's error."""
    world = dist.group.WORLD
    has_own_timeout = len(args) > 1 or kwargs.get("timeout") is not None
    if async_op or has_own_timeout or world is None or group not in (None, world):
        return barrier(group, async_op, *args, **kwargs)
    with Waiting("torch.distributed.barrier", "", world.group_name):  # ranks may pass other options
        return barrier(group, async_op, *args, **kwargs)


@cache
def _watch_end() -> None:
    atexit.register(_tell)


def _tell() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    text = "" if error is None else f" after {type(error).__name__}: {error}".split("\n")[0][:200]
    note_end(text)
