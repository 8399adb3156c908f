"""Changes of shards that go on in another thread; whoever reads or writes a shard waits for them.

An optimizer whose step returns before all is updated says so here, and a model whose gradients come
to the host, or whose parameters are loaded from there, when its calls have returned. Torch
functions of shards, and what takes their memory, ask; a forward waits unit by unit in C++ and does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Each returns the state of a model, or None if there is none any more.
_under_way: set[Callable[[], Any]] = set()
_always: set[Callable[[], Any]] = set()


def begin(state_ref: Callable[[], Any]) -> None:
    """From now on shards of the model change until its engine is synchronised."""
    _under_way.add(state_ref)


def watch(state_ref: Callable[[], Any]) -> None:
    """Each call of the model may be followed by transfers that end when its engine is asked."""
    _always.add(state_ref)


def finish() -> None:
    """Blocks until no shard changes any more; raises RuntimeError if an update failed."""
    for state_ref in _under_way | _always:
        state = state_ref()
        if state is None:
            _always.discard(state_ref)
        else:
            state.engine.synchronize()  # where a disk has failed again and again
        _under_way.discard(state_ref)
