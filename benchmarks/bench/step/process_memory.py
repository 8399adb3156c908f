"""Reads this process's resident memory from Linux."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def resident_mib() -> float:
    """Returns the memory that is resident now, in MiB."""
    return _status_mib("VmRSS")


def peak_resident_mib() -> float:
    """Returns the peak of resident memory since `reset_peak`, in MiB."""
    return _status_mib("VmHWM")


def reset_peak() -> None:
    """Returns free heap to the system, and resets the peak to the memory that is resident now.

    If free heap stayed, the peak of a model's construction would count for its training.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(name: str) -> float:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(match.group(1)) / 1024
