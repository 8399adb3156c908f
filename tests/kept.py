"""Outputs of tools, kept between runs and checkouts until the sources or tools change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zerocore" / "tests"
_UNUSED_SECONDS = 30 * 24 * 3600


def kept(kind: str, key: list[str], make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` filled for this key, or fills now.

    Args:
        key: all that the result depends on, the version of the tool with it. No folder of this
            checkout may be part of the result.
    """
    folder = CACHE / kind / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the first one
        if not folder.exists():
            _delete_unused(folder.parent)
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.replace(folder)
    os.utime(folder)
    return folder


def _delete_unused(parent: Path) -> None:
    for folder in parent.iterdir():
        if folder.is_dir() and time.time() - folder.stat().st_mtime > _UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".lock").unlink(missing_ok=True)
