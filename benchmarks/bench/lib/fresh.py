"""Runs a function in a new process, in which nothing else is loaded or allocated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_in_fresh_process(function: Callable[..., Result], *args: Any) -> Result:
    """Returns `function(*args)`; an interrupt kills the process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except KeyboardInterrupt:
            # Leaving the pool would wait for the call.
            for child in active_children():
                child.kill()
            raise
