"""The device's work as torch.profiler records it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.kernels.timeline import Timeline, read_timeline


def timeline_of(run: Callable[[], object], *activities: ProfilerActivity) -> Timeline:
    """The calls and the work of `run`, which is waited for."""
    torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_timeline(path)


def names_of_work(run: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and sets of `run`, by their start."""
    timeline = timeline_of(run, ProfilerActivity.CPU, ProfilerActivity.CUDA)
    return [work.name for work in sorted(timeline.work, key=lambda work: work.start_us)]
