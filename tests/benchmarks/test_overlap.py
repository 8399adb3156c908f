"""benchmarks/overlap.py: its arithmetic, what it believes that systems send, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerocore import _C as C

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_hidden_percent() -> None:
    from bench.overlap.report import Figures

    figures = Figures(100.0, 130.0, 80.0, 20.0, 30.0, 20.0)
    assert figures.hidden(figures.exposed_ms) == 62.5
    assert figures.hidden_of_possible(figures.exposed_ms) == pytest.approx(100 * (1 - 10 / 60))
    assert figures.hidden_of_possible(figures.wait_ms) == 100.0
    assert figures.hidden(None) is None
    assert Figures(100.0, 100.0, 0.0, 0.0, 0.0, None).hidden(0.0) is None


def test_the_second_measurement_of_a_peer_is_called_what_it_is() -> None:
    from bench.overlap.report import Figures, _of_link

    assert _of_link(Figures(100.0, 130.0, 80.0, 20.0, 30.0, 35.0)) == "75.0 (waits in the link)"
    assert _of_link(Figures(100.0, 130.0, 80.0, 20.0, 30.0, None)) == "-"


def num_collectives(group: dist.ProcessGroup) -> int:
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def test_emulated_links_of_a_block() -> None:
    """A gather takes as long over all ranks as within a replica, and so does the sum across."""
    from bench.lib.links import EmulatedLink, Traffic

    link = EmulatedLink(torch.device("cpu"))
    try:
        link.slow_down(1 << 20, gather_ms=3.0)
        block = link.block_ms(1 << 20)
        assert (block.all_gather, block.across) == pytest.approx((3.0, 3.0), abs=1e-5)
        traffic = Traffic(all_gather=2, reduce_scatter=1, across=4)
        assert link.step_ms(1 << 20, traffic) == pytest.approx(21.0, abs=1e-4)
        for group, kind, nbytes in zip(
            link.mesh.get_all_groups(),
            (C.Traffic.ALL_REDUCE, C.Traffic.ALL_GATHER),
            (1 << 18, 1 << 20),
            strict=True,
        ):
            own = group._get_backend(link.device).link
            assert own.duration_ns(kind, nbytes, group.size()) == pytest.approx(3e6, abs=10)
    finally:
        dist.destroy_process_group()


def test_traffic_is_what_the_systems_send() -> None:
    from bench.lib.links import EmulatedLink
    from bench.overlap.run import COMPARED, HYBRID, OTHER_OPTIONS, OverlapRun, Workload, traffic_of

    link = EmulatedLink(torch.device("cpu"))
    try:
        work = Workload(3, 16, 2, 1, 4, num_rounds=1, steps_per_round=1)
        run = OverlapRun(link, work, (*COMPARED, *OTHER_OPTIONS, *HYBRID))
        everyone = dist.distributed_c10d._get_default_group()
        replicas, shards = link.mesh.get_all_groups()
        for subject in run.subjects:
            system = subject.system
            within = shards if system.hybrid else everyone
            before = [num_collectives(group) for group in (within, replicas)]
            run.step(subject)
            sent = num_collectives(within) - before[0], num_collectives(replicas) - before[1]
            traffic = traffic_of(system, work.num_blocks)
            expected = traffic.all_gather + traffic.reduce_scatter + traffic.all_reduce
            assert sent == (expected, traffic.across), system.label
            assert (traffic.across > 0) == system.hybrid
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
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
    markdown = next(tmp_path.glob("*.md")).read_text()
    assert "EMULATED" in markdown
    rows = [line.strip("| ").split("|") for line in markdown.splitlines() if "| its own" in line]
    rows += [line.strip("| ").split("|") for line in markdown.splitlines() if "| tied" in line]
    # Lookups: of tokens and of positions, each gathered once; a tied table for the head as well.
    assert [int(row[3]) for row in rows] == [2, 3]
