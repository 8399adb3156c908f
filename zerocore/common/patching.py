"""Writes a replacement of a torch function as a function of the original and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(body: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes a wrapper of an original function from ``body(original, *args, **kwargs)``.

    A wrapper adds one Python call, so functions that run often in a step do not use it.
    """

    @wraps(body)
    def wrap(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        return run

    return wrap
