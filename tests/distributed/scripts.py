"""Runs Python scripts in forked processes that have imported torch, zerocore and transformers.

Importing them takes a process longer than most scripts run, and each of their ranks does it again.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch.multiprocessing as mp

from tests.distributed.harness import run_to_end


def run_script(path: Path, *arguments: str | Path, timeout: float = 100) -> tuple[int, str]:
    """The exit code, and what the script and its ranks wrote to standard output and error.

    Ranks that it starts with torch.multiprocessing.spawn are forked, too.

    Raises:
        AssertionError: it did not end in `timeout` seconds.
    """
    with tempfile.NamedTemporaryFile(mode="r", prefix="script-", suffix=".log") as log:
        words = [str(path), *map(str, arguments)]
        (outcome,) = run_to_end(_run, 1, words, log.name, timeout=timeout, launch="none")
        text = log.read()
        if outcome.error:
            return 1, text + outcome.error
        return outcome.value, text


def run_program(
    text: str, world_size: int, *arguments: str, timeout: float = 90
) -> list[tuple[int, str]]:
    """Each rank's exit code and output; a process ends as Python ends, its modules torn down."""
    job = (text, ["program.py", *arguments])
    outcomes = run_to_end(_run_and_exit, world_size, *job, timeout=timeout, launch="torchrun")
    found = []
    for outcome in outcomes:
        ended = re.match(r"died, exit code (-?\d+)\n", outcome.error or "")
        assert ended, outcome
        found.append((int(ended[1]), (outcome.error or "")[ended.end() :]))
    return found


def _run_and_exit(text: str, words: list[str]) -> None:
    sys.argv = words
    main = sys.modules["__main__"] = type(sys)("__main__")
    code: object = 0
    try:
        exec(compile(text, words[0], "exec"), vars(main))
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as Python does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def _run(words: list[str], log: str) -> int:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["COLUMNS"] = "200"
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    mp.spawn = partial(mp.start_processes, start_method="fork")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    return code if isinstance(code, int) else 1
