"""Functions in the place of torch's, written as functions of the original and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(body: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes of ``body(original, *args, **kwargs)`` the wrapper of an original function.

    A call of the original costs one more call of Python, so functions of each step do without.
    """

    @wraps(body)
    def wrap(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        return run

    return wrap
