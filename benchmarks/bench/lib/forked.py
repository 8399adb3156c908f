"""Runs a function on many gloo ranks, forks of this process, so that torch is imported once."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=300)


def run_forked(function: Callable[[], Any], size: int) -> list[Any]:
    """Returns the results of `function` on `size` ranks, converted to JSON and back.

    Raises:
        RuntimeError: a rank failed; it has printed why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_fork(function, rank, size, folder) for rank in range(size)]
        try:
            ended = [os.waitpid(child, 0)[1] for child in children]
        except KeyboardInterrupt:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            raise
        if any(ended):
            raise RuntimeError(f"a rank of {size} failed")
        return [json.loads(_result(folder, rank).read_text("utf-8")) for rank in range(size)]


def _fork(function: Callable[[], Any], rank: int, size: int, folder: Path) -> int:
    child = os.fork()
    if child != 0:
        return child
    try:
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        text = json.dumps(function())
        _result(folder, rank).write_text(text, encoding="utf-8")
        while not all(_result(folder, each).exists() for each in range(size)):
            time.sleep(0.1)  # a rank that ends breaks the others' connections
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {error!r}\n")
        os._exit(1)
    os._exit(0)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"
