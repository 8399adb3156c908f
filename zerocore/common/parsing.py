"""Reads numbers of bytes, and other quantities with units."""

from __future__ import annotations

import math
import re

NBYTES = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


def parse_nbytes(value: str | int | float, name: str = "memory") -> int:
    """Returns bytes from a number or a text such as ``"24GiB"`` (2**30) or ``"24GB"`` (10**9)."""
    nbytes = parse(value, name, NBYTES, "24GiB")
    if math.isinf(nbytes):
        raise ValueError(f"{name} must be a number of bytes, got {value!r}")
    return int(nbytes)


def parse(value: str | float, name: str, units: dict[str, float], example: str) -> float:
    """Returns the value in the unit whose factor is 1. Raises TypeError or ValueError by name."""
    expected = f"{name} must be a number or text such as '{example}', got {value!r}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(expected)
    number = float(value) if not isinstance(value, str) else _parse_text(value, units, expected)
    if not number >= 0:
        raise ValueError(f"{name} must be 0 or more, got {value!r}")
    return number


def _parse_text(text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|inf)\s*([a-z/]*)\s*", text.lower())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"{expected} (units: {known}; in any case)")
    return float(match[1]) * units[match[2]]
