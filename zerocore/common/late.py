"""Calls functions of packages above the core, and rare ones; imports each at its first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

modules: dict[str, str] = {}  # the module that has a function, by the function's name


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function of this name."""
    return getattr(import_module(modules[name]), name)(*args, **kwargs)
