"""benchmarks/bench/kernels/timeline.py: spans of time, and the reading of a profiler's trace."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.kernels.timeline import (
    DeviceWork,
    Span,
    hidden_share,
    length,
    overlap,
    parse_timeline,
    read_timeline,
    union,
)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(1, 1)], []),
        ([(3, 2)], []),
        ([(2, 3), (0, 1)], [(0, 1), (2, 3)]),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(0, 9), (1, 2), (8, 10)], [(0, 10)]),
    ],
)
def test_union(spans: list[Span], expected: list[Span]) -> None:
    assert union(spans) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(0, 5)], 0),
        ([(0, 5)], [(5, 9)], 0),
        ([(0, 5)], [(4, 9)], 1),
        ([(0, 10)], [(1, 2), (3, 4), (9, 12)], 3),
        ([(0, 2), (0, 2), (1, 3)], [(0, 1), (2, 4)], 2),
    ],
)
def test_overlap(first: list[Span], second: list[Span], expected: float) -> None:
    assert overlap(first, second) == overlap(second, first) == expected


def test_overlap_counts_every_moment_once() -> None:
    """Against a count of the moments, on random spans."""
    rng = random.Random(0)
    for _ in range(200):
        lists = []
        for _ in range(2):
            starts = [rng.randrange(30) for _ in range(rng.randrange(6))]
            lists.append([(start, start + rng.randrange(8)) for start in starts])
        moments = [{t for start, end in spans for t in range(start, end)} for spans in lists]
        assert overlap(*lists) == len(moments[0] & moments[1])
        assert length(lists[0]) == len(moments[0])


def kernel(name: str, start: float, end: float) -> DeviceWork:
    return DeviceWork("kernel", name, 7, start, end)


def test_hidden_share() -> None:
    work = [
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 10),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 20, 30),
        kernel("gemm", 2, 6),
        kernel("gemm", 4, 8),
        kernel("gemm", 12, 25),
        DeviceWork("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 0, 30, 8),
    ]
    assert hidden_share(work) == pytest.approx((6 + 5) / 20)
    assert hidden_share(work[:2]) == 0.0
    assert hidden_share(work[2:]) is None


def test_parse() -> None:
    def event(cat: str, name: str, ts: float, **args: int) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 2, "args": args}

    timeline = parse_timeline(
        [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            event("user_annotation", "steps", 10),
            event("cuda_runtime", "cudaLaunchKernel", 9),
            event("cuda_runtime", "cudaLaunchKernel", 10),
            event("cuda_driver", "cuLaunchKernelEx", 11),
            event("cuda_runtime", "cudaDeviceSynchronize", 12),
            event("kernel", "gemm", 20, stream=7, device=0),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 23, stream=13, bytes=64),
            event("gpu_memset", "Memset (Device)", 26, stream=7, bytes=4),
            event("gpu_user_annotation", "steps", 20, stream=7),
            event("cpu_op", "aten::mm", 10),
        ]
    )
    assert timeline.work == [
        DeviceWork("kernel", "gemm", 7, 20, 22),
        DeviceWork("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 13, 23, 25, 64),
        DeviceWork("gpu_memset", "Memset (Device)", 7, 26, 28, 4),
    ]
    assert timeline.ranges == {"steps": (10, 12)}
    assert timeline.calls_within("steps") == ["cudaLaunchKernel", "cuLaunchKernelEx"]


def test_reads_what_the_profiler_writes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("steps"):
        torch.ones(2).sum()
    profiler.export_chrome_trace(str(path))
    assert json.loads(path.read_text())["traceEvents"]
    timeline = read_timeline(path)
    assert timeline.work == [] and timeline.calls_within("steps") == []
