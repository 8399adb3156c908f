"""Errors where a library of an extra is not installed."""

from __future__ import annotations


def missing(library: str, extra: str, purpose: str) -> ModuleNotFoundError:
    """The error where ``purpose``, such as ``"pictures of timelines"``, lacks ``library``."""
    return ModuleNotFoundError(
        f"{purpose}: {library} is not installed; pip install 'zerocore[{extra}]'", name=library
    )
