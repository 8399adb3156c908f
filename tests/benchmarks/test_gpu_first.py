"""benchmarks/gpu_first.sh with an interpreter that only records: order, limits, gate, a cut run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_first.sh"
CHECKS = ("machine", "rates", "kernels", "adamw", "parity")
# Stands for python: writes its arguments down, and what gpu_checks.py would write. $BAD names a
# check that fails, $SLOW a part of the arguments of a call that hangs and ignores interrupts.
PYTHON = f"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *gpu_checks.py\\ --list) echo {" ".join(CHECKS)} ;;
  *gpu_checks.py*)
    for name in "${{@:2}}"; do
      result=ok && [[ $name == "${{BAD:-}}" ]] && result=failed
      printf '{{"check": "%s", "result": "%s"}}\\n' "$name" "$result" >>"$ZEROCORE_CHECKS"
      echo "$name says" >"$ZEROCORE_LOGS/$name.log"
    done ;;
  *"${{SLOW:-nothing}}"*) trap "" INT && echo began && sleep 60 ;;
esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment in which there seems to be a GPU."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        ("python", PYTHON),
        ("nvidia-smi", "#!/bin/sh\necho a GPU\n"),
        ("compute-sanitizer", "#!/bin/sh\nexit 0\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": str(folder / "python"), "CALLS": str(calls)}


def run(machine: dict[str, str], out: Path, *words: str, **more: str) -> Any:
    command = [str(SCRIPT), str(out), *words]
    return subprocess.run(command, env=machine | more, capture_output=True, text=True, timeout=90)


def parts(out: Path) -> list[str]:
    """The parts that the summary has, in order."""
    lines = (out / "summary.txt").read_text().splitlines()
    return re.findall(r"^ *\d+ s  (\w+)", "\n".join(lines), re.MULTILINE)


def names(out: Path) -> list[str]:
    with tarfile.open(out / "results.tar.gz") as tar:
        return tar.getnames()


def test_the_most_valuable_first(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [part for part in parts(tmp_path / "out") if part not in ("rank_tests", "memcheck")]
    assert found[:2] == ["extension", "checks"]
    order = ["multi_rank", "tests", "kernels_rate", "step_one", "overlap", "memory"]
    assert [part for part in found if part in order] == order
    calls = Path(machine["CALLS"]).read_text()
    assert f"benchmarks/gpu_checks.py {' '.join(CHECKS)}" in calls
    checks = (tmp_path / "out" / "checks.jsonl").read_text().splitlines()
    assert [json.loads(line)["check"] for line in checks] == list(CHECKS)


@pytest.mark.parametrize("check", ["machine", "kernels", "adamw", "parity"])
def test_wrong_numbers_stop_the_run(machine: dict[str, str], tmp_path: Path, check: str) -> None:
    done = run(machine, tmp_path / "out", BAD=check)
    assert done.returncode == 3
    assert f"GATE: {check} is not ok" in done.stdout and f"{check} says" in done.stdout
    assert parts(tmp_path / "out") == ["extension", "checks"]
    assert f"logs/{check}.log" in names(tmp_path / "out")


def test_another_check_stops_nothing(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, tmp_path / "out", BAD="rates")
    assert done.returncode == 0 and '"rates", "result": "failed"' in done.stdout
    assert "link_rate" in parts(tmp_path / "out")


def test_a_part_that_hangs_ends_with_the_budget(machine: dict[str, str], tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(machine, tmp_path / "out", SLOW="kernels.py", BUDGET_S="12")
    assert done.returncode == 0 and time.monotonic() - began < 40
    lines = (tmp_path / "out" / "summary.txt").read_text()
    assert re.search(r"kernels_rate +\d+ s  exit 137", lines)
    assert re.search(r"memory .*not run: 12 s are spent", lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_cut_run_keeps_all_parts_before(
    machine: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [str(SCRIPT), str(out)], env=machine | {"SLOW": "overlap.py"}, start_new_session=True
    )
    while "overlap.py" not in Path(machine["CALLS"]).read_text():
        time.sleep(0.1)
    os.kill(process.pid, number)
    process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert parts(out)[-1] == "step_emulated"
    assert {"logs/step_one.log", "checks.jsonl"} <= set(names(out))


def test_some_parts_again(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, tmp_path / "out", "only", "kernels", "memory")
    assert done.returncode == 0, done.stdout
    assert parts(tmp_path / "out") == ["extension", "checks", "memory"]
    checks = (tmp_path / "out" / "checks.jsonl").read_text().splitlines()
    assert [json.loads(line)["check"] for line in checks] == ["kernels"]


# Plugins of pytest: AdamW's kernel (without a GPU the CPU's) leaves out a tensor; a step's
# gradients are not reduced.
WRONG_KERNEL = """
import torch
from tests.kernels import cases

class Wrong:
    def __getattr__(self, name):
        return getattr(torch.ops.zerocore, name)

    def adamw(self, *lists, **options):
        torch.ops.zerocore.adamw(*(tensors[1:] for tensors in lists), **options)

cases.ops = Wrong()
"""
LOST_REDUCTION = """
from tests.gpu import training

run_step = training.run_step

def run_alone(model, *arguments):
    with training.no_sync(model):
        return run_step(model, *arguments)

training.run_step = run_alone
"""


@pytest.mark.parametrize(
    ("check", "plugin", "place"),
    [("adamw", WRONG_KERNEL, "test_adamw.py"), ("parity", LOST_REDUCTION, "test_parity.py")],
)
def test_checks_of_the_gate_find_a_fault(
    tmp_path: Path, check: str, plugin: str, place: str
) -> None:
    (tmp_path / "planted.py").write_text(plugin)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'benchmarks'}"}
    env |= {"PYTEST_ADDOPTS": "-p planted", "ZEROCORE_CHECKS": str(tmp_path / "checks.jsonl")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_checks.py"), check]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    line = json.loads((tmp_path / "checks.jsonl").read_text())
    assert line["result"] == "failed" and place in line["error"]


def test_a_check_that_hangs_ends_by_force(tmp_path: Path) -> None:
    env = {**os.environ, "ZEROCORE_CHECK_LIMIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_checks.py"), "adamw"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ended by force after 1 s" in done.stdout
