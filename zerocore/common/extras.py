"""The error for a library of an extra that is not installed."""

from __future__ import annotations


def missing(library: str, extra: str, purpose: str) -> ModuleNotFoundError:
    """Returns the error: ``purpose``, such as ``"pictures of timelines"``, needs ``library``."""
    return ModuleNotFoundError(
        f"{purpose}: {library} is not installed; pip install 'zerocore[{extra}]'", name=library
    )
