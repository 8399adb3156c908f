"""A training step as boxes on lanes: streams, units, exposed waits; drawn, or as a Chrome trace."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
WAIT = "exposed wait"
COLORS = {
    "forward": "tab:gray",
    "backward": "tab:olive",
    "all_gather": "tab:blue",
    "reduce_scatter": "tab:green",
    "all_reduce": "tab:green",
    WAIT: "tab:red",
}
NARROW = 0.012  # of the step: a label does not fit


@dataclass(frozen=True)
class Box:
    """Something on a lane that lasted from `start_ns` to `end_ns`; `kind` is a key of COLORS."""

    lane: str
    label: str
    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Mark:
    """The host began the forward or backward of a block; the last mark ends the step."""

    kind: str
    label: str
    time_ns: int


def boxes_of(events: Sequence[Any], marks: Sequence[Mark] = ()) -> list[Box]:
    """Boxes of zerocore's events and, on the lane "compute", of what came between the marks.

    A link carries one collective at a time: one that was issued before the last was done begins
    when that was done.
    """
    boxes = [
        Box("compute", mark.label, mark.kind, mark.time_ns, following.time_ns)
        for mark, following in itertools.pairwise(marks)
    ]
    free_ns = 0
    for event in events:
        if event.op not in COLLECTIVES or event.done_ns < 0:
            continue
        label = event.unit.removeprefix("blocks.")
        start_ns = min(max(event.issued_ns, free_ns), event.done_ns)
        boxes.append(Box(event.op, label, event.op, start_ns, event.done_ns))
        free_ns = event.done_ns
        if event.wait_ns > 0:
            boxes.append(Box(WAIT, label, WAIT, event.done_ns - event.wait_ns, event.done_ns))
    return boxes


def draw_boxes(axes: Axes, boxes: Sequence[Box]) -> int:
    """Draws a lane per kind of work, in milliseconds from the first box on; returns that start."""
    lanes = [lane for lane in ("compute", *COLLECTIVES, WAIT) if any(b.lane == lane for b in boxes)]
    start = min(box.start_ns for box in boxes)
    whole = max(box.end_ns for box in boxes) - start
    for box in boxes:
        y, left, width = lanes.index(box.lane), box.start_ns - start, box.end_ns - box.start_ns
        axes.barh(y, width / 1e6, left=left / 1e6, color=COLORS[box.kind], edgecolor="white")
        if width > NARROW * whole and len(box.label) <= 3:
            middle = (left + width / 2) / 1e6
            axes.text(middle, y, box.label, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    return start


def draw_step(boxes: Sequence[Box], title: str, path: Path) -> None:
    """A picture of one step."""
    figure, axes = plt.subplots(figsize=(12, 2.8), layout="constrained")
    draw_boxes(axes, boxes)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("ms")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_chrome_trace(boxes: Sequence[Box], path: Path) -> None:
    """The boxes for Perfetto or chrome://tracing; a thread per lane, times in microseconds."""
    start = min(box.start_ns for box in boxes)
    lanes = list(dict.fromkeys(box.lane for box in boxes))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": lanes.index(box.lane),
            "name": f"{box.kind} {box.label}",
            "ts": (box.start_ns - start) / 1e3,
            "dur": (box.end_ns - box.start_ns) / 1e3,
        }
        for box in boxes
    ]
    path.write_text(json.dumps({"traceEvents": events}) + "\n", encoding="utf-8")
