"""Reads rates and times, and writes quantities with units."""

from __future__ import annotations

from collections.abc import Callable

from zerocore.common.parsing import NBYTES, parse

_BANDWIDTHS = {f"{unit}/s": factor for unit, factor in NBYTES.items() if unit} | {
    "bit/s": 0.125, "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6, "tbit/s": 125e9,
}  # fmt: skip
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES = {"flop/s": 1.0, "gflop/s": 1e9, "tflop/s": 1e12, "pflop/s": 1e15}
_RATES |= {unit.replace("flop/s", "flops"): factor for unit, factor in _RATES.items()}
_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def parse_bandwidth(value: str | float, name: str = "bandwidth") -> float:
    """Returns bytes per second from a number or a text such as ``"450GB/s"``, ``"400Gbit/s"``."""
    return parse(value, name, _BANDWIDTHS, "450GB/s")


def parse_seconds(value: str | float) -> float:
    """Returns seconds from a number or a text such as ``"12us"``."""
    return parse(value, "latency", _TIMES, "12us")


def parse_flops(value: str | float) -> float:
    """Returns floating-point operations per second from a number or text like ``"400TFLOP/s"``."""
    rate = parse(value, "flops", _RATES, "400TFLOP/s")
    if rate == 0:
        raise ValueError(f"flops must be positive, got {value!r}")
    return rate


def format_nbytes(nbytes: float) -> str:
    """Formats bytes in decimal units, such as ``"38.50 GB"``."""
    return _format(nbytes, "B", "PTGMk")


def format_flops(flops: float) -> str:
    """Formats a number of operations, such as ``"58.08 TFLOP"``."""
    return _format(flops, "FLOP", "PTGM")


def _format(value: float, unit: str, prefixes: str) -> str:
    for prefix in prefixes:
        factor = _PREFIXES[prefix]
        if abs(value) >= factor:
            return f"{value / factor:,.2f} {prefix}{unit}"
    return f"{value:,.0f} {unit}"


def format_number(digits: int, scale: float = 1.0) -> Callable[[float | None], str]:
    """Returns a formatter of numbers times ``scale`` with ``digits`` decimals; ``-`` for None."""
    return lambda value: "-" if value is None else f"{value * scale:,.{digits}f}"


def format_seconds(seconds: float) -> str:
    """Formats seconds, such as ``"1.25 s"`` or ``"12.5 ms"``."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"
