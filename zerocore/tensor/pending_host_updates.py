"""Work on shards that goes on behind a step or a call; reads and writes of a shard wait for it.

An optimizer whose step returns before all is updated says so here, and a model whose gradients come
to the host, or whose parameters are loaded from there, when its calls have returned. So does a step
behind which gathers read the shards: writers wait for these. Torch functions of shards, and what
takes their memory, ask; a forward waits unit by unit in C++ and does not.
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

# Each returns the state of a model, or None if there is none any more.
_under_way: set[Callable[[], Any]] = set()
_always: set[Callable[[], Any]] = set()
_gathering: dict[Callable[[], Any], int] = {}  # and the thread that has begun the gathers


def begin(state_ref: Callable[[], Any]) -> None:
    """From now on shards of the model change until its engine is synchronised."""
    _under_way.add(state_ref)


def watch(state_ref: Callable[[], Any]) -> None:
    """Each call of the model may be followed by transfers that end when its engine is asked."""
    _always.add(state_ref)


def begin_gathers(state_ref: Callable[[], Any]) -> None:
    """Gathers behind a step read the shards of the model until its engine has finished them."""
    _watch_end()
    _gathering[state_ref] = threading.get_ident()


@cache
def _watch_end() -> None:
    atexit.register(_finish_at_end)


def _finish_at_end() -> None:
    """The others may still need this rank's part of what it has updated last."""
    devices = {state.device for each in _gathering if (state := each()) is not None}
    if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
        with suppress(RuntimeError):  # theirs, which have ended
            finish()
            for device in devices:
                if device.type != "cpu":
                    torch.get_device_module(device).synchronize(device)


def finish() -> None:
    """Blocks until a shard may be written to: as :func:`finish_updates`, and no gather that this
    thread has begun reads it."""
    finish_updates()
    own = [each for each, thread in _gathering.items() if thread == threading.get_ident()]
    for state_ref in own:
        _gathering.pop(state_ref)
        if (state := state_ref()) is not None:
            # Maybe of another model, whose group is gone: it raises at its own next use.
            with suppress(RuntimeError):
                state.engine.finish_gathers()


def finish_updates() -> None:
    """Blocks until no shard changes any more; raises RuntimeError if an update failed."""
    for state_ref in _under_way | _always:
        state = state_ref()
        if state is None:
            _always.discard(state_ref)
        else:
            state.engine.synchronize()  # where a disk has failed again and again
        _under_way.discard(state_ref)
