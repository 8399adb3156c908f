"""Lets ``torch.nn.init`` see the full shape of sharded parameters.

Most of its functions ask for the number of dimensions before any torch function could tell, and
some return early from an empty tensor without drawing numbers, so they are wrapped, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.nn import init

from zerocore.tensor.place import Placed
from zerocore.tensor.rules import initialise

_KNOWS_SHARDS = "_zerocore_knows_shards"


def watch_initialisers() -> None:
    """Wraps every function of ``torch.nn.init`` that changes a tensor."""
    for name in dir(init):
        function = getattr(init, name)
        is_public = name.endswith("_") and not name.startswith("_")
        if is_public and callable(function) and not hasattr(function, _KNOWS_SHARDS):
            setattr(init, name, _wrapped(function))


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if isinstance(tensor, Placed):
            return initialise(function, args, kwargs)
        return function(*args, **kwargs)

    setattr(run, _KNOWS_SHARDS, True)
    return run
