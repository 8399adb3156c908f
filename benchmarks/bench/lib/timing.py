"""Times calls in turns: device time on CUDA, wall time of one thread on the CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Call = Callable[[], object]

# Long enough for the clock's resolution, short enough for many turns.
ROUND_SECONDS = 0.01
CALLS_PER_GRAPH = 20


def time_in_turns(calls: Mapping[str, Call], device: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call, one figure a round; in a round all calls take turns.

    On CUDA a call is captured into a graph and replayed, which leaves out host time. A
    call that cannot be captured is left out with a message, unless it is the first one.
    """
    timers: dict[str, Callable[[], float]] = {}
    for name, call in calls.items():
        try:
            timers[name] = _cuda_timer(call) if device == "cuda" else _cpu_timer(call)
        except RuntimeError as error:
            if device != "cuda" or not timers:
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
    names = list(timers)
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(timers[name]())
    return found


def ratio(times: Mapping[str, list[float]], own: str, other: str) -> float:
    """Returns the median over the rounds of `own` / `other` in the same round."""
    return median(a / b for a, b in zip(times[own], times[other], strict=True))


def fastest(times: Mapping[str, list[float]], names: list[str]) -> str:
    """Returns the name with the smallest median."""
    return min(names, key=lambda name: median(times[name]))


def _cpu_timer(call: Call) -> Callable[[], float]:
    call()
    repeats = max(1, int(ROUND_SECONDS / _wall(call, 1)))
    return lambda: _wall(call, repeats)


def _wall(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _cuda_timer(call: Call) -> Callable[[], float]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream if the capture fails.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    _replayed(graph, 1)  # the first replay uploads the graph
    replays = max(1, int(ROUND_SECONDS / (CALLS_PER_GRAPH * _replayed(graph, 1))))
    return lambda: _replayed(graph, replays)


def _replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / replays / CALLS_PER_GRAPH
