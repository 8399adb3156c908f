"""Checks of a caller's numbers."""

from __future__ import annotations


def require_int(name: str, value: object) -> int:
    """Returns the value; raises TypeError if it is not an int, or is a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return value


def check_int(name: str, value: object, minimum: int) -> None:
    """Raises TypeError if ``value`` is not an int, ValueError if it is below ``minimum``."""
    if require_int(name, value) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
