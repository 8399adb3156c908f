"""``python -m zerocore top`` follows all ranks of a running job, in a terminal and without one."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from rich.console import Console

from tests.distributed.harness import run_ranks
from zerocore.cli.top import NUM_UNITS, Run, follow

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0


def line(rank: int, step: int, exposed: dict[str, float] | None = None) -> dict[str, Any]:
    figures = {"step": step, "step_ms": 12.5, "tokens_per_s": 1000.0, "memory/parameters": 2048}
    return {
        **{"time": time.time(), "rank": rank, "world_size": 2, "model": "Chain"},
        **{f"zerocore/{name}": value for name, value in figures.items()},
        "units": {name: {"exposed_ms": value} for name, value in (exposed or {}).items()},
    }


def append(folder: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    for each in lines:
        with open(folder / f"figures-{each['rank']}.jsonl", "a") as file:
            file.write(json.dumps(each) + end)


def shown(folder: Path) -> str:
    written = io.StringIO()
    follow(folder, 1.0, once=True, console=Console(width=160, file=written))
    return written.getvalue()


def test_the_view_has_every_rank_and_the_units_that_wait(tmp_path: Path) -> None:
    assert "waiting for figures-RANK.jsonl" in shown(tmp_path)
    append(tmp_path, line(0, 3, {"a": 1.0, "b": 0.5}), line(1, 4, {"a": 3.0, "b": 0.25}))
    append(tmp_path, line(1, 5))  # not traced: units stay
    text = shown(tmp_path)
    assert "Chain: 2 of 2 ranks, 2,000 tokens/s" in text
    rows = [re.split(r"\s*[│┃]\s*", row.strip("│┃ ")) for row in text.splitlines()]
    assert ["0", "3", "12.5", "1,000", "2.05 kB", "0"] in rows
    assert ["1", "5", "12.5", "1,000", "2.05 kB", "0"] in rows
    assert ["a", "2.00", "3.00", "1"] in rows
    assert ["b", "0.38", "0.50", "0"] in rows
    assert "MFU" not in text  # no rank knows it


def test_the_units_that_wait_the_longest_are_shown(tmp_path: Path) -> None:
    append(tmp_path, line(0, 1, {f"unit{n}": float(n) for n in range(NUM_UNITS + 3)}))
    text = shown(tmp_path)
    assert f"{NUM_UNITS} of {NUM_UNITS + 3} units" in text
    assert "unit3 " in text and "unit2 " not in text


def test_a_line_that_is_not_complete_waits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    append(tmp_path, line(0, 1))
    half = json.dumps(line(0, 2))
    with open(tmp_path / "figures-0.jsonl", "a") as file:
        file.write(half[:20])
    run.read()
    assert run.lines[0]["zerocore/step"] == 1
    with open(tmp_path / "figures-0.jsonl", "a") as file:
        file.write(half[20:] + "\n")
    run.read()
    assert run.lines[0]["zerocore/step"] == 2
    (tmp_path / "figures-0.jsonl").write_text(json.dumps(line(0, 0)) + "\n")  # a new run
    run.read()
    assert run.lines[0]["zerocore/step"] == 0


@pytest.mark.nightly
def test_no_such_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerocore", "top", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 2
    assert "is no folder; zerocore.FigureLog makes it" in result.stderr


def train_until_told(folder: str) -> None:
    """Steps until a file says that it was seen; all ranks do the same number."""
    import torch
    import torch.distributed as dist

    import zerocore
    from tests.distributed.chain import WIDTH, Chain

    model = zerocore.shard(Chain(), stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    with zerocore.FigureLog(model, folder, tokens=3) as log:
        told = torch.zeros(1)
        while not told.item():
            model(torch.randn(3, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write()
            time.sleep(0.02)
            told.fill_(Path(folder, "seen").exists())
            dist.all_reduce(told)


class Terminal:
    """A program in a terminal of 40 lines by 150 columns."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
            size = {"COLUMNS": "150", "LINES": "40"}  # those of pytest's terminal are not meant
            environment = {**os.environ, **size, "TERM": "xterm-256color"}
            os.execvpe(command[0], command, environment)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
        self.written = b""

    def read(self) -> None:
        try:
            self.written += os.read(self.file, 65536)
        except OSError:  # it has ended
            time.sleep(0.05)

    def screen(self) -> str:
        """The text since the cursor went home last."""
        frames = self.written.decode(errors="replace").split("\x1b[H")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-1])

    def until(self, is_there: Callable[[str], bool]) -> str:
        """The screen, as soon as it is so; fails after a minute."""
        end = time.monotonic() + SECONDS
        while not is_there(screen := self.screen()):
            assert time.monotonic() < end, screen
            self.read()
        return screen

    def interrupt(self) -> int:
        """Ctrl-C; its exit code. It is read to its end, as it may wait for room to write."""
        end = time.monotonic() + SECONDS
        os.kill(self.pid, signal.SIGINT)
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, self.screen()
            self.read()
        return os.waitstatus_to_exitcode(found[1])


def steps(screen: str) -> list[int]:
    """The steps of ranks 0 and 1 on the screen."""
    return [int(n.replace(",", "")) for n in re.findall(r"│\s+[01] │\s+([\d,]+) │", screen)]


def test_a_running_job_of_two_ranks_in_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_ranks, train_until_told, 2, str(folder), timeout=3 * SECONDS)
        command = [sys.executable, "-m", "zerocore", "top", str(folder), "--interval", "0.1"]
        terminal = Terminal(command)
        try:
            screen = terminal.until(lambda text: len(steps(text)) == 2 and "blocks.3" in text)
            assert "Chain: 2 of 2 ranks" in screen
            first = max(steps(screen))
            terminal.until(lambda text: len(steps(text)) == 2 and min(steps(text)) > first)
        finally:
            (folder / "seen").touch()
            code = terminal.interrupt()
        job.result()
        assert code == 0
