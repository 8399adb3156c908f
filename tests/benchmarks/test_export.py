"""The benchmark of exports runs on real ranks, by each way that it compares."""

from __future__ import annotations

from bench.export.run import LABELS, RAW, export_on_this_rank, park_on_this_rank, planned_peak
from tests.distributed.harness import run_ranks


def test_each_way_is_measured() -> None:
    for found in run_ranks(export_on_this_rank, 2, 64, 2, "fp32", 10**6, 2):
        assert {label: len(rounds) for label, rounds in found.items()} == dict.fromkeys(
            (*LABELS, RAW), 2
        )
        assert all(ms > 0 for rounds in found.values() for ms, _ in rounds)


def test_the_peak_is_the_planned_one() -> None:
    planned, measured = run_ranks(planned_peak, 2, 64, 4, "fp32", 10**5)[0]
    assert planned == measured > 0


def test_parking_is_measured() -> None:
    found = run_ranks(park_on_this_rank, 1, 2**26, 1)[0]
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(
        ("park", "copy", "return", "copy to new"), 1
    )
