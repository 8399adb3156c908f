"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def resident_mib() -> float:
    """Memory that is resident now, in MiB."""
    return _status_mib("VmRSS")


def peak_resident_mib() -> float:
    """The most that was resident since `reset_peak`, in MiB."""
    return _status_mib("VmHWM")


def reset_peak() -> None:
    """Gives free heap back to the system and starts a new peak from what is resident now.

    Without the first, a peak of the construction of a model would pass for one of its training.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(name: str) -> float:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(match.group(1)) / 1024
