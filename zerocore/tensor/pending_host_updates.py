"""Waits for work on shards that continues after a step or a call.

An optimizer registers here if its step returns before the update ends. A model registers if its
gradients are copied to the host, or its parameters from there, after its calls have returned. A
step also registers if gathers after it read the shards: writers wait for these. Torch functions of
shards, and functions that take their memory, wait here. A forward waits unit by unit in C++.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

# Each callable returns the state of a model, or None once the model is gone.
_under_way: set[Callable[[], Any]] = set()
_always: set[Callable[[], Any]] = set()
_gathering: dict[Callable[[], Any], int] = {}  # the thread that has begun a model's gathers


def begin(state_ref: Callable[[], Any]) -> None:
    """Notes that shards of the model change until its engine is synchronised."""
    _under_way.add(state_ref)


def watch(state_ref: Callable[[], Any]) -> None:
    """Notes that transfers may continue after each call of the model, until a synchronisation."""
    _always.add(state_ref)


def begin_gathers(state_ref: Callable[[], Any]) -> None:
    """Notes that gathers after a step read the model's shards until the engine finishes them."""
    _watch_end()
    _gathering[state_ref] = threading.get_ident()


@cache
def _watch_end() -> None:
    atexit.register(_finish_at_end)


def _finish_at_end() -> None:
    """Finishes gathers at exit: other ranks may still need this rank's updated part."""
    devices = {state.device for ref in _gathering if (state := ref()) is not None}
    if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
        with suppress(RuntimeError):  # from ranks that have ended
            finish()
            for device in devices:
                if device.type != "cpu":
                    torch.get_device_module(device).synchronize(device)


def finish() -> None:
    """Waits until shards may be written: after :func:`finish_updates`, also for the gathers that
    this thread has begun."""
    finish_updates()
    refs = [ref for ref, thread in _gathering.items() if thread == threading.get_ident()]
    for state_ref in refs:
        _gathering.pop(state_ref)
        if (state := state_ref()) is not None:
            # The gathers may be of another model, whose group is gone; its next use raises.
            with suppress(RuntimeError):
                state.engine.finish_gathers()


def finish_updates() -> None:
    """Waits until all updates of shards have ended; raises RuntimeError if one failed."""
    for state_ref in _under_way | _always:
        state = state_ref()
        if state is None:
            _always.discard(state_ref)
        else:
            state.engine.synchronize()  # raises if the disk has failed repeatedly
        _under_way.discard(state_ref)
