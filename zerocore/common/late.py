"""Functions that the core calls and packages over it have: each is imported at its first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

modules: dict[str, str] = {}  # by the name of a function that one has


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function of this name."""
    return getattr(import_module(modules[name]), name)(*args, **kwargs)
