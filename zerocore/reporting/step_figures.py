"""Figures of a report: communication of a step or unit, one step, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from zerocore.common.events import EXCHANGE, GATHERS
from zerocore.reporting.events import Event, Queues, transfers


@dataclass(frozen=True)
class CommunicationTimes:
    """Of one traced step, or of one unit in it; milliseconds.

    Attributes:
        all_gather_ms: time that all-gathers had the link.
        reduce_ms: the same of reduce-scatters and all-reduces.
        exposed_ms: time that compute stood still for them.
        exchange_ms: time that all-to-alls of an optimizer of whole matrices had the link.
    """

    all_gather_ms: float = 0.0
    reduce_ms: float = 0.0
    exposed_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Time that collectives had the link."""
        return self.all_gather_ms + self.reduce_ms + self.exchange_ms

    @property
    def overlap(self) -> float | None:
        """Share of the communication that compute did not wait for; None without any."""
        return 1 - self.exposed_ms / self.total_ms if self.total_ms > 0 else None


@dataclass(frozen=True)
class StepFigures:
    """One step.

    Attributes:
        number: from 0 on, since ``shard``.
        step_ms: from its first forward to the next step's.
        outside_ms: the part after the optimizer's update.
        tokens_per_s: of this rank; None where tokens were not given.
        mfu: share of the device's peak; None where that, or tokens, is not known.
        gathered_nbytes: bytes of the full buckets of its all-gathers.
        near_nbytes: the part of them from near ranks.
        reduced_nbytes: the same of its reduce-scatters and all-reduces.
        num_collectives: of both kinds.
        exchanged_nbytes: bytes that this rank sent in all-to-alls of an optimizer of whole
            matrices.
        pool_nbytes: most bytes of the bucket pool in use in it.
        num_pool_allocations: how often the bucket pool took memory from the device's allocator;
            never in a step that repeats the one before.
        num_retries: times that torch's allocator freed its cache because memory was short; None on
            the CPU, whose allocator does not count.
        num_device_allocations: its calls to the device's own allocation, such as cudaMalloc; None
            on the CPU. Both are those of the process.
        communication: times; None if the step was not traced.
        units: the same by unit.
    """

    number: int
    step_ms: float
    outside_ms: float
    tokens_per_s: float | None
    mfu: float | None
    gathered_nbytes: int
    near_nbytes: int
    reduced_nbytes: int
    num_collectives: int
    exchanged_nbytes: int
    pool_nbytes: int
    num_pool_allocations: int
    num_retries: int | None
    num_device_allocations: int | None
    communication: CommunicationTimes | None
    units: dict[str, CommunicationTimes] | None

    @property
    def idle_ms(self) -> float | None:
        """Outside of the step's work, or waiting for communication; None if not traced."""
        traced = self.communication
        return None if traced is None else self.outside_ms + traced.exposed_ms


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes and counts on this rank so far: since the process began or their reset by the user.

    Attributes:
        pool_peak: high-water mark of the bucket pool since ``shard``; a step has its own.
        pool_reserved: what the pool took from the device's allocator.
        allocated_peak: of torch's allocator; None on the CPU, whose allocator does not count.
        reserved_peak: the same.
        num_retries: times that torch's allocator had to free its cache; None on the CPU.
        num_device_allocations: its calls to the device's own allocation; None on the CPU.
        resident_peak: most memory of the process that was resident.
        host: weights, gradients and states on the host, by ``offload=``; 0 without.
        disk: bytes of this rank's file, by ``offload=``; 0 without.
    """

    pool_peak: int
    pool_reserved: int
    allocated_peak: int | None
    reserved_peak: int | None
    num_retries: int | None
    num_device_allocations: int | None
    resident_peak: int
    host: int = 0
    disk: int = 0


def times_by_unit(events: Sequence[Event], queues: Queues) -> dict[str, CommunicationTimes]:
    """Link time and exposed time of each unit's collectives; ``queues`` as for ``transfers``."""
    found: dict[str, CommunicationTimes] = defaultdict(CommunicationTimes)
    for event, begin_ns in transfers(events, queues):
        own, busy_ms = found[event.unit], (event.done_ns - begin_ns) / 1e6
        field = {**dict.fromkeys(GATHERS, "all_gather_ms"), EXCHANGE: "exchange_ms"}.get(
            event.op, "reduce_ms"
        )
        busy = {field: getattr(own, field) + busy_ms}
        found[event.unit] = replace(own, exposed_ms=own.exposed_ms + event.wait_ns / 1e6, **busy)
    return dict(found)


def total(parts: Sequence[CommunicationTimes]) -> CommunicationTimes:
    return CommunicationTimes(*map(sum, zip(*map(astuple, parts), strict=True)))


def unit_means(traces: Sequence[dict[str, CommunicationTimes]]) -> dict[str, CommunicationTimes]:
    """Mean over traced steps, by unit; a unit without communication in a step has zeros there."""
    names = dict.fromkeys(name for trace in traces for name in trace)
    means = {}
    for name in names:
        whole = total([trace.get(name, CommunicationTimes()) for trace in traces])
        means[name] = CommunicationTimes(*(part / len(traces) for part in astuple(whole)))
    return means
