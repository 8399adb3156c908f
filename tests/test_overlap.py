"""benchmarks/overlap.py: its arithmetic, what it believes that systems send, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def test_hidden_percent(importable: None) -> None:
    from _overlap_report import Figures

    figures = Figures(100.0, 130.0, 80.0, 20.0, 30.0, 20.0)
    assert figures.hidden(figures.exposed_ms) == 62.5
    assert figures.hidden_of_possible(figures.exposed_ms) == pytest.approx(100 * (1 - 10 / 60))
    assert figures.hidden_of_possible(figures.wait_ms) == 100.0
    assert figures.hidden(None) is None
    assert Figures(100.0, 100.0, 0.0, 0.0, 0.0, None).hidden(0.0) is None


def test_traffic_is_what_the_systems_send(importable: None) -> None:
    from _links import EmulatedLink, torch
    from _overlap_run import COMPARED, OTHER_PREFETCH, OverlapRun, Workload, traffic_of

    link = EmulatedLink(torch.device("cpu"))
    try:
        work = Workload(3, 16, 2, 1, 4, num_rounds=1, steps_per_round=1)
        run = OverlapRun(link, work, (*COMPARED, *OTHER_PREFETCH))
        backend = dist.distributed_c10d._get_default_group()._get_backend(link.device)
        for subject in run.subjects:
            before = backend._get_sequence_number_for_group()
            run.step(subject)
            sent = backend._get_sequence_number_for_group() - before
            traffic = traffic_of(subject.system, work.num_blocks)
            expected = traffic.all_gather + traffic.reduce_scatter + traffic.all_reduce
            assert sent == expected, subject.system.label
    finally:
        dist.destroy_process_group()


def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "overlap.py")]
    done = subprocess.run(
        [*command, "--quick", "--out", str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = sorted(path.name.split("_overlap_")[1] for path in tmp_path.iterdir())
    suffixes = (".json", ".md", "_sweep.png", "_timeline.png", "_trace.json")
    assert names == [f"emulated_cpu{suffix}" for suffix in suffixes]
    results, trace = (
        json.loads(next(tmp_path.glob(f"*{end}.json")).read_text()) for end in ("cpu", "trace")
    )
    assert results["link"] == "emulated"
    for rounds in results["systems"].values():
        assert len(rounds["0.0"]["step_ms"]) == results["workload"]["num_rounds"]
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"compute", "all_gather", "reduce_scatter"} <= lanes
    assert "EMULATED" in next(tmp_path.glob("*.md")).read_text()
