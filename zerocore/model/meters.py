"""A sharded model's meters, always on: counters of each step, a trace of one step in 16."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zerocore._C import AllocatorCounts, Engine, OpCounter, TraceRecord, allocator_counts
from zerocore.common.events import COLLECTIVES, EXCHANGE

SAMPLE_EVERY = 16
"""One step of this many is traced; each other step costs two additions per collective."""
KEPT_STEPS = 1024
"""The number of latest steps that the meters keep."""


@dataclass(frozen=True)
class Count:
    """The number of operations, and the bytes of their full buckets."""

    num: int
    nbytes: int


@dataclass
class Step:
    """One step on the host's clock, from its first forward to the next step's or to the last
    update. ``StepFigures`` in ``reporting`` explains the other attributes."""

    number: int
    step_ns: int
    outside_ns: int
    counts: Mapping[str, Count]  # collectives, by operation
    exchanged: Count  # all-to-alls of a matrix optimizer, and the bytes that this rank sent
    pool_nbytes: int
    num_pool_allocations: int
    num_retries: int | None
    num_device_allocations: int | None
    records: list[TraceRecord] | None = field(default=None, repr=False)  # of a traced step


def increase(before: int, after: int) -> int:
    """Returns how much a total has grown; one that the user has reset began at 0 again."""
    return after - before if after >= before else after


class Meters:
    """The latest steps of one model, from the begins of its passes and its optimizers' updates."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = str(device)
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._num_steps = 0
        self._begin_ns = 0  # of the open step, 0 without one
        self._updated_ns = 0  # last update in the open step
        self._before = self._totals()
        self._sampling = False
        self._unread: Step | None = None  # a traced step whose records are still in the engine
        self._recording = False

    def begin_pass(self) -> None:
        """Notes that a root forward begins; the first one after an update begins a step."""
        if self._updated_ns:
            self._close(time.perf_counter_ns())
        if not self._begin_ns and torch.is_grad_enabled():
            self._open()

    def note_update(self) -> None:
        """Notes that an optimizer has updated the model; several may do so in one step."""
        if self._begin_ns:
            self._updated_ns = time.perf_counter_ns()

    def steps(self, *, waits: bool = True) -> list[Step]:
        """Returns the latest steps; a step is complete after its update.

        With ``waits``, waits for updates on the host, which complete their records. Without it, a
        traced step has records only after the next step.
        """
        if self._updated_ns:
            self._close(self._updated_ns)
        if self._unread is not None and waits:
            self._engine.synchronize()
        if self._unread is not None and (waits or self._unread.number + 1 < self._num_steps):
            self._read()
        return list(self._steps)

    @contextmanager
    def recording(self) -> Iterator[list[TraceRecord]]:
        """Records a trace for the user and fills the list at the end; ValueError if nested."""
        if self._recording:
            raise ValueError("this model is being recorded already; recordings do not nest")
        self.steps()
        self._recording, self._sampling = True, False
        records: list[TraceRecord] = []
        self._engine.start_trace()
        try:
            yield records
        finally:
            self._engine.synchronize()  # the host's work completes its records
            records += self._engine.stop_trace()
            self._recording = False

    def _open(self) -> None:
        self._sampling = not self._recording and self._num_steps % SAMPLE_EVERY == 1
        if self._sampling:
            self._read()  # 15 updates later, its records are complete: updates wait in turn
            self._engine.start_trace(align=False)
        self._before = self._totals()
        self._engine.forget_recent_peak()
        self._begin_ns = time.perf_counter_ns()

    def _totals(self) -> tuple[dict[str, OpCounter], int, AllocatorCounts | None]:
        """Returns the engine's totals since ``shard``, and torch's allocator's in this process."""
        engine = self._engine
        return engine.counters, engine.pool_stats.num_allocations, allocator_counts(self._device)

    def _close(self, end_ns: int) -> None:
        counters, num_allocations, allocator = self._totals()
        before, num_allocations_before, allocator_before = self._before
        changes = {
            op: Count(
                counters[op].count - before[op].count, counters[op].nbytes - before[op].nbytes
            )
            for op in (*COLLECTIVES, EXCHANGE)
        }
        exchanged = changes.pop(EXCHANGE)
        step = Step(
            self._num_steps,
            end_ns - self._begin_ns,
            end_ns - self._updated_ns,
            changes,
            exchanged,
            self._engine.pool_stats.recent_peak_nbytes,
            num_allocations - num_allocations_before,
            *_allocations(allocator_before, allocator),
        )
        self._steps.append(step)
        self._num_steps += 1
        self._begin_ns = self._updated_ns = 0
        if self._sampling:
            # To read now would make the host wait for the device.
            self._engine.pause_trace()
            self._sampling, self._unread = False, step

    def _read(self) -> None:
        """Takes the traced step's records from the engine; the work that writes them has ended."""
        if self._unread is not None:
            self._unread.records = self._engine.stop_trace()
            self._unread = None


def _allocations(
    before: AllocatorCounts | None, after: AllocatorCounts | None
) -> tuple[int | None, int | None]:
    if before is None or after is None:
        return None, None
    num_retries = increase(before.num_retries, after.num_retries)
    return num_retries, increase(before.num_device_allocations, after.num_device_allocations)
