"""How long ranks may wait for each other, and what one tells the others when its program ends."""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache

from zerocore._C import note_end

STALL_SECONDS = "ZEROCORE_STALL_SECONDS"
DEFAULT_SECONDS = 60.0


def stall_seconds() -> float:
    """Seconds after which a collective that does not end is an error; 0 for never.

    Raises:
        ValueError: the environment variable is not a number of 0 or more.
    """
    text = os.environ.get(STALL_SECONDS, "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{STALL_SECONDS}: expected seconds, 0 or more, got {text!r}")
    return seconds


@cache
def watch_end() -> None:
    """From now on the others are told if this program ends while they wait for it."""
    atexit.register(_tell)


def _tell() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    text = "" if error is None else f" after {type(error).__name__}: {error}".split("\n")[0][:200]
    note_end(text)
