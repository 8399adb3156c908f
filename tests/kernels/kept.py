"""What tools make of sources, kept in build/ until the sources or the tools are others."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


def kept(kind: str, key: list[str], make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` filled for this key, or fills now.

    Args:
        key: all that the result depends on, the version of the tool with it.
    """
    folder = BUILD / kind / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        try:
            unfinished.replace(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
            if not folder.exists():
                raise
    return folder
