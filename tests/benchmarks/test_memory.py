"""benchmarks/memory.py: its arithmetic, its sampling, a short run on the CPU, no GPU asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "memory.py"), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_sampler_sees_a_peak_and_its_end() -> None:
    from bench.memory.sampler import CpuMemory, Sampler

    memory = CpuMemory()
    # More than earlier tests have left free in the heap, some of which may be resident.
    nbytes = memory.reserved_nbytes() - memory.allocated_nbytes() + (64 << 20)
    with Sampler(memory) as sampler:
        block = torch.ones(nbytes, dtype=torch.uint8)
        held = sampler.read()
        del block
    first, last = sampler.samples[0], sampler.samples[-1]
    # Garbage of earlier tests may go meanwhile.
    assert abs(held.allocated - first.allocated - nbytes) < 1 << 20
    assert held.outside - first.outside >= 32 << 20
    assert last.allocated - first.allocated < 1 << 20
    assert [s.time_ns for s in sampler.samples] == sorted(s.time_ns for s in sampler.samples)
    assert not sampler._thread.is_alive()


def test_formula() -> None:
    """The example of 7 B fp32 parameters on 8 ranks: 112, 63, 38.5 and 14 GB."""
    from bench.memory.cell import SYSTEMS, Cell, MemoryRun
    from bench.memory.report import formula

    runs = [MemoryRun("", stage, num_params=7 * 10**9) for stage in range(4)]
    cell = Cell(SYSTEMS[0], "7b", 8, 1, "float32", "cpu")
    assert [formula(cell, run) / 1e9 for run in runs] == [112, 63, 38.5, 14]
    runs = [MemoryRun("", stage, num_params=4 * 10**9) for stage in range(4)]
    cell = Cell(SYSTEMS[0], "4b", 2, 1, "bfloat16", "cpu")
    assert [formula(cell, run) / 1e9 for run in runs] == [32, 24, 20, 16]


def test_sizes_are_what_they_are_called() -> None:
    from bench.memory.cell import GPT, SIZES

    for name, numel in (("7b", 7e9), ("4b", 4e9), ("29m", 29e6)):
        with torch.device("meta"):
            params = GPT(SIZES[name]).parameters()
        assert sum(param.numel() for param in params) == pytest.approx(numel, rel=0.02)


@pytest.mark.nightly
@pytest.mark.slow
def test_run_on_the_cpu(tmp_path: Path) -> None:
    done = run("--size", "small", "--world-size", "4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no figures from NVML" in done.stdout or "CPU" in done.stdout
    names = sorted(path.name.split("_memory_")[1] for path in tmp_path.iterdir())
    suffixes = (".json", ".md", "_bars.png", "_step.png")
    assert names == [f"small_emulated_cpu{suffix}" for suffix in suffixes]
    raw = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert raw["link"] == "emulated" and raw["device"] == "cpu"
    by_label = {each["label"]: each for each in raw["runs"]}
    assert list(by_label) == ["stage 0", "stage 1", "stage 2", "stage 3", "FSDP2"]
    states = []
    for label, each in by_label.items():
        parts = each["measured"]
        steady = each["phases"]["steady steps"]
        if label != "FSDP2":
            assert parts == each["planned"]
        known = sum(parts.values()) - parts["pool"] + each["saved_activations"]
        assert known <= steady["allocated_peak"] + (1 << 20)
        assert list(each["marks"]) == ["forward", "backward", "optimizer", "end"]
        states.append(parts["parameters"] + parts["gradients"] + parts["optimizer"])
    assert states[:4] == sorted(states[:4], reverse=True)
    assert states[4] == pytest.approx(states[3], rel=0.02)
    assert "EMULATED" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error() -> None:
    done = run("--device", "cuda")
    assert done.returncode == 2
    assert "no figures from NVML" in " ".join(done.stderr.replace("│", " ").split())
