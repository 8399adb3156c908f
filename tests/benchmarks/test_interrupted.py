"""A benchmark that is interrupted or killed after its first row leaves a result file with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.by_night import by_night
from tests.distributed.harness import find_free_port

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("typer")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
# More rows than are measured before the signal comes.
COMMANDS = (
    *by_night(
        "checkpoint.py --blocks 1 --rounds 1",
        "control_plane.py --largest 32 --rounds 100",
        "export.py --width 64 --depth 2 --rounds 2",
        "gather.py --rounds 5",
        "host_overhead.py --params 1,4 --systems zerocore --rounds 2 --passes 50",
        "link_accuracy.py",
        "many_ranks.py --ranks 2,3,4,5 --rounds 1 --steps 10",
        "memory.py --size small --world-size 4 --device cpu",
        "meters.py --rounds 20000",
        "multi_rank.py",
        "muon.py --rounds 1 --steps 20",
        "offload.py --parts adamw,steps --millions 1 --rounds 2",
        "optimizer.py --device cpu --millions 4 --ranks 1 --rounds 15",
        "overlap.py --quick --rounds 50",
        "parity.py --steps 2",
        "published.py",
        "step.py --size small --ranks 1 --peers plain",
        "wire_methods.py",
    ),
    "kernels.py --device cpu --mib 8 --rounds 30",
)


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *f"{ROOT}/benchmarks/{command}".split()],
        env={
            **os.environ,
            **(one_rank if command == "multi_rank.py" else {}),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "ZEROCORE_RESULTS": str(folder),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def send_after_first_row(number: int, command: str, folder: Path) -> tuple[int, str]:
    """Exit status and output of a benchmark that gets the signal once its first row is written."""
    with start(command, folder) as process:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not list(folder.glob("*.md")) and process.poll() is None:
                assert time.monotonic() < deadline, "no row was written"
                time.sleep(0.05)
            process.send_signal(number)
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, output


def check_files(folder: Path, command: str) -> None:
    theme = command.split(".py")[0]
    (raw,) = folder.glob("*.json")
    assert theme in raw.name
    record = json.loads(raw.read_text())
    assert record["complete"] is False and theme in record["command"]
    page = raw.with_suffix(".md").read_text()
    assert "**Incomplete**" in page and "\n| " in page


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_run_leaves_its_rows(command: str, tmp_path: Path) -> None:
    if command == "published.py":
        pytest.importorskip("transformers")
    status, output = send_after_first_row(signal.SIGINT, command, tmp_path)
    assert status == 130, output
    check_files(tmp_path, command)
    assert "written: " in output and "Load of the machine" in output


@pytest.mark.nightly
def test_a_killed_run_leaves_its_rows(tmp_path: Path) -> None:
    send_after_first_row(signal.SIGKILL, COMMANDS[-1], tmp_path)
    check_files(tmp_path, COMMANDS[-1])
