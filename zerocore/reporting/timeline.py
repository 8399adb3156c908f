"""Draws training steps as boxes on lanes (modules, collectives, waits), or writes Chrome traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerocore.common.events import COLLECTIVES, EXCHANGE
from zerocore.common.extras import missing
from zerocore.reporting.events import HOST, Event, Queues, transfers

WAIT = "exposed wait"
LANES = ("compute", *COLLECTIVES, EXCHANGE, *HOST, WAIT)
COLORS = {
    "forward": "tab:gray",
    "recompute": "tab:brown",
    "backward": "tab:olive",
    "optimizer": "tab:purple",
    "all_gather": "tab:blue",
    "gather_near": "tab:blue",
    "gather_sums": "tab:green",
    "reduce_scatter": "tab:green",
    "all_reduce": "tab:green",
    EXCHANGE: "tab:cyan",
    "to_host": "tab:pink",
    "host_squares": "tab:cyan",
    "host_update": "tab:purple",
    "to_device": "tab:orange",
    WAIT: "tab:red",
}
NARROW = 0.012  # a label does not fit into a box below this part of the width


@dataclass(frozen=True)
class Box:
    """A span of time on a lane, from ``start_ns`` to ``end_ns``.

    Attributes:
        lane: one of :data:`LANES`.
        kind: a key of :data:`COLORS`.
        label: the unit, or empty.
    """

    lane: str
    label: str
    kind: str
    start_ns: int
    end_ns: int


@dataclass
class Timeline:
    """The boxes of the recorded steps; times are nanoseconds of a monotonic clock.

    Attributes:
        label: ``measured`` or ``emulated``, and the model.
        boxes: in no particular order.
        pool: ``(time, bytes)`` of the bucket pool in use, in order.
    """

    label: str = ""
    boxes: list[Box] = field(default_factory=list)
    pool: list[tuple[int, int]] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        """When the first box begins; 0 without boxes."""
        return min((box.start_ns for box in self.boxes), default=0)

    def write(self, path: Path) -> None:
        """Writes a Chrome trace (``.json``) or a picture (``.png``)."""
        check_path(path)
        if path.suffix == ".png":
            draw_timeline(self, path)
        else:
            path.write_text(json.dumps(chrome_trace(self)) + "\n", encoding="utf-8")


def check_path(path: Path) -> None:
    """Raises ValueError for a path that a timeline cannot have, ImportError without matplotlib."""
    if path.suffix not in (".json", ".png"):
        raise ValueError(f"a timeline goes to a .json or .png file, got '{path}'")
    if not path.parent.is_dir():
        raise ValueError(f"'{path}': there is no folder '{path.parent}'; make it first")
    if path.suffix == ".png":
        _import_figure()


def _import_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing("matplotlib", "plot", "pictures of timelines") from None
    return Figure


def event_boxes(events: Sequence[Event], queues: Queues) -> list[Box]:
    """Makes the boxes of collectives, of waits for them, and of work on the host; ``queues``: as
    for :func:`transfers`."""
    boxes = []
    for event, begin_ns in transfers(events, queues):
        boxes.append(Box(event.op, event.unit, event.op, begin_ns, event.done_ns))
        if event.wait_ns > 0:
            start_ns = event.done_ns - event.wait_ns
            boxes.append(Box(WAIT, event.unit, WAIT, start_ns, event.done_ns))
    for event in events:
        if event.op in HOST and event.done_ns >= 0:
            boxes.append(Box(event.op, event.unit, event.op, event.issued_ns, event.done_ns))
    return boxes


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns Chrome's trace format: a thread per lane, in microseconds since the first box."""
    start = timeline.start_ns
    lanes = _lanes(timeline.boxes)
    records: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    records += [
        {
            "ph": "X",
            "pid": 0,
            "tid": lanes.index(box.lane),
            "name": f"{box.kind} {box.label}".strip(),
            "ts": (box.start_ns - start) / 1e3,
            "dur": (box.end_ns - box.start_ns) / 1e3,
        }
        for box in timeline.boxes
    ]
    records += [
        {
            "ph": "C",
            "pid": 0,
            "name": "bucket pool",
            "ts": (time_ns - start) / 1e3,
            "args": {"bytes": nbytes},
        }
        for time_ns, nbytes in timeline.pool
    ]
    return {"traceEvents": records, "otherData": {"label": timeline.label}}


def draw_timeline(timeline: Timeline, path: Path, title: str = "") -> None:
    """Draws a lane for each kind of work and, below, the bytes of the pool if it is used."""
    has_pool = any(nbytes > 0 for _, nbytes in timeline.pool)
    figure = _import_figure()(figsize=(12, 4.2 if has_pool else 2.8), layout="constrained")
    ratios = (3, 1) if has_pool else (1,)
    rows = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_boxes(rows[0], timeline.boxes, timeline.start_ns)
    rows[0].set_title(title or timeline.label, fontsize=10)
    if has_pool:
        times = [(time_ns - timeline.start_ns) / 1e6 for time_ns, _ in timeline.pool]
        mebibytes = [nbytes / 2**20 for _, nbytes in timeline.pool]
        rows[1].fill_between(times, mebibytes, step="post", color="tab:gray", alpha=0.6)
        rows[1].set_ylabel("pool, MiB")
    rows[-1].set_xlabel("ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lanes(boxes: Iterable[Box]) -> list[str]:
    used = {box.lane for box in boxes}
    return [lane for lane in LANES if lane in used]


def _draw_boxes(axes: Any, boxes: Sequence[Box], start: int) -> None:
    from matplotlib.patches import Patch

    lanes = _lanes(boxes)
    whole = max((box.end_ns for box in boxes), default=start) - start
    for box in boxes:
        y, left, width = lanes.index(box.lane), box.start_ns - start, box.end_ns - box.start_ns
        axes.barh(y, width / 1e6, left=left / 1e6, color=COLORS[box.kind], edgecolor="white")
        label = box.label.rpartition(".")[2]
        if width > NARROW * whole and len(label) <= 3:
            axes.text((left + width / 2) / 1e6, y, label, ha="center", va="center", fontsize=7)
    kinds = [
        kind for kind in COLORS if any(box.kind == kind and kind not in lanes for box in boxes)
    ]
    if kinds:
        patches = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
        axes.legend(
            handles=patches, fontsize=7, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1, 1)
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
