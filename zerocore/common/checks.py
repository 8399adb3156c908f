"""Checks of numbers that a caller gives."""

from __future__ import annotations


def require_int(name: str, value: object) -> int:
    """The value; raises TypeError if it is no int. A bool counts as none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return value


def check_int(name: str, value: object, minimum: int) -> None:
    """Raises TypeError if ``value`` is no int, ValueError if it is below ``minimum``."""
    if require_int(name, value) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
