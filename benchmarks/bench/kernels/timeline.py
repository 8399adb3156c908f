"""Reads a GPU's work from torch.profiler's Chrome trace, and computes with spans of time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (start, end), any unit; the end is not part of it.
Span = tuple[float, float]

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_KINDS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class DeviceWork:
    """A span of work on a stream, in microseconds; copies and sets have `nbytes`."""

    kind: str
    name: str
    stream: int
    start_us: float
    end_us: float
    nbytes: int = 0

    @property
    def span(self) -> Span:
        return self.start_us, self.end_us

    @property
    def is_communication(self) -> bool:
        """Whether this is a kernel of NCCL."""
        return self.kind == "kernel" and "nccl" in self.name.lower()


@dataclass(frozen=True)
class HostCall:
    """A call of the CUDA runtime or driver; `start_us` in microseconds."""

    name: str
    start_us: float


@dataclass(frozen=True)
class Timeline:
    """One profiled run: the device's work, the host's calls, and record_function's ranges."""

    work: list[DeviceWork]
    calls: list[HostCall]
    ranges: dict[str, Span]

    def calls_within(self, name: str) -> list[str]:
        """Returns the names of host calls that began within the range of that name."""
        start, end = self.ranges[name]
        return [call.name for call in self.calls if start <= call.start_us < end]


def read_timeline(path: Path) -> Timeline:
    """Reads a file of `torch.profiler.profile.export_chrome_trace`."""
    return parse_timeline(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def parse_timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """Reads the trace's events; leaves out those without a duration."""
    timeline = Timeline([], [], {})
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat", ""), event["name"]
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        args = event.get("args", {})
        if kind in DEVICE_KINDS:
            nbytes = int(args.get("bytes", 0))
            timeline.work.append(DeviceWork(kind, name, int(args["stream"]), start, end, nbytes))
        elif kind in HOST_KINDS:
            timeline.calls.append(HostCall(name, start))
        elif kind == "user_annotation":
            timeline.ranges[name] = (start, end)
    return timeline


def hidden_share(work: Iterable[DeviceWork]) -> float | None:
    """Returns the share of NCCL's kernel time with another kernel running; None without any."""
    communication, compute = [], []
    for item in work:
        if item.kind == "kernel":
            (communication if item.is_communication else compute).append(item.span)
    total = length(communication)
    return overlap(communication, compute) / total if total > 0 else None


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the union of spans as disjoint spans in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[Span]) -> float:
    """Returns the time that at least one span covers."""
    return sum(end - start for start, end in union(spans))


def overlap(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Returns the time that both `first` and `second` cover."""
    a, b = union(first), union(second)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
