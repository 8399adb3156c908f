"""Classes of a report's figures: communication of a step or unit, one step, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from zerocore.common.events import EXCHANGE, GATHERS
from zerocore.reporting.events import Event, Queues, transfers


@dataclass(frozen=True)
class CommunicationTimes:
    """Times of communication in a traced step, or of a unit in it, in milliseconds.

    Attributes:
        all_gather_ms: time in which all-gathers used the link.
        reduce_ms: time in which reduce-scatters and all-reduces used the link.
        exposed_ms: time that compute waited for communication.
        exchange_ms: time in which all-to-alls of an optimizer of whole matrices used the link.
    """

    all_gather_ms: float = 0.0
    reduce_ms: float = 0.0
    exposed_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Time in which collectives used the link."""
        return self.all_gather_ms + self.reduce_ms + self.exchange_ms

    @property
    def overlap(self) -> float | None:
        """Share of the communication that compute hid; None without communication."""
        return 1 - self.exposed_ms / self.total_ms if self.total_ms > 0 else None


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step.

    Attributes:
        number: counts steps from 0 on, since ``shard``.
        step_ms: time from the step's first forward to the next step's.
        outside_ms: the part of it after the optimizer's update.
        tokens_per_s: tokens a second of this rank; None without ``tokens``.
        mfu: model FLOPs utilization; None if tokens, their operations or the peak are unknown.
        gathered_nbytes: bytes of the full buckets of its all-gathers.
        near_nbytes: the part of them that came from near ranks.
        reduced_nbytes: bytes of the full buckets of its reduce-scatters and all-reduces.
        num_collectives: number of its gathers and reductions.
        exchanged_nbytes: bytes that this rank sent in all-to-alls of an optimizer of whole
            matrices.
        pool_nbytes: most bytes of the bucket pool in use.
        num_pool_allocations: how often the bucket pool took memory from the device's allocator; 0
            in a step that repeats the previous one.
        num_retries: how often torch's allocator freed its cache because memory was short, in the
            whole process; None on the CPU, whose allocator does not count.
        num_device_allocations: how often torch's allocator called the device's, such as cudaMalloc,
            in the whole process; None on the CPU.
        communication: times; None if the step was not traced.
        units: times by unit.
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
        """Time after the update or exposed to communication; None if not traced."""
        traced = self.communication
        return None if traced is None else self.outside_ms + traced.exposed_ms


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes and counts on this rank since the process began, or since the user reset them.

    Attributes:
        pool_peak: peak of the bucket pool since ``shard``.
        pool_reserved: bytes that the pool has taken from the device's allocator.
        allocated_peak: most bytes allocated from torch's allocator; None on the CPU.
        reserved_peak: most bytes that torch's allocator reserved; None on the CPU.
        num_retries: how often torch's allocator freed its cache; None on the CPU.
        num_device_allocations: how often it called the device's allocator; None on the CPU.
        resident_peak: most resident memory of the process.
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
    """Returns each unit's times of communication; ``queues``: as for :func:`transfers`."""
    units: dict[str, CommunicationTimes] = defaultdict(CommunicationTimes)
    for event, begin_ns in transfers(events, queues):
        sums, busy_ms = units[event.unit], (event.done_ns - begin_ns) / 1e6
        field = {**dict.fromkeys(GATHERS, "all_gather_ms"), EXCHANGE: "exchange_ms"}.get(
            event.op, "reduce_ms"
        )
        busy = {field: getattr(sums, field) + busy_ms}
        units[event.unit] = replace(sums, exposed_ms=sums.exposed_ms + event.wait_ns / 1e6, **busy)
    return dict(units)


def total(parts: Sequence[CommunicationTimes]) -> CommunicationTimes:
    return CommunicationTimes(*map(sum, zip(*map(astuple, parts), strict=True)))


def unit_means(traces: Sequence[dict[str, CommunicationTimes]]) -> dict[str, CommunicationTimes]:
    """Returns each unit's mean over traced steps; without communication its times are 0."""
    names = dict.fromkeys(name for trace in traces for name in trace)
    means = {}
    for name in names:
        whole = total([trace.get(name, CommunicationTimes()) for trace in traces])
        means[name] = CommunicationTimes(*(part / len(traces) for part in astuple(whole)))
    return means
