"""Predicts the time of a step by simulating the planned collectives on links."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore._C import CallEvent, PlannedEvent
from zerocore.common.events import COLLECTIVES, GATHERS
from zerocore.common.links import Link
from zerocore.planning.activations import mirrored


@dataclass(frozen=True)
class Timing:
    """The predicted times of a step, in seconds, on one link or on several.

    Attributes:
        link: the name of the link, or the names of all.
        communication_s: time of all collectives, one after the other.
        compute_s: time of all operations, without communication.
        step_s: predicted step; it hides as much as the order of collectives allows.
        across_s: the part of ``communication_s`` on the link between replicas; 0 if replicas use
            the same link.
    """

    link: str
    communication_s: float
    compute_s: float
    step_s: float
    across_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """The longest of compute and each link's traffic; no schedule is faster."""
        return max(self.communication_s - self.across_s, self.across_s, self.compute_s)

    @property
    def exposed_s(self) -> float:
        """Time that compute waits for communication."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """Share of the communication that compute hides; 1 without communication."""
        if self.communication_s == 0:
            return 1.0
        return 1.0 - self.exposed_s / self.communication_s


def predict_timing(
    events: list[PlannedEvent],
    order: tuple[CallEvent, ...],
    compute_s: tuple[float, ...],
    link: Link,
    replica_link: Link | None = None,
    near_link: Link | None = None,
) -> Timing:
    """Simulates one step. Collectives queue on their link in the order of issue.

    A unit's forward and backward wait for its gather. A reduction waits for the previous one, as
    the runtime has one in flight. A sum over the replicas waits for the reduction whose shards it
    sums. The step ends when all are done. Optimizer and host time do not count. Gathers that
    begin when the optimizer's step ends overlap the next forward.

    Args:
        events: planned events of the step.
        order: calls of the forward; moments are numbered by it.
        compute_s: seconds of compute by moment.
        link: the link between ranks that share the state.
        replica_link: the link between replicas; None for the same.
        near_link: the link between near ranks; None for the same.
    """
    across, near = replica_link or link, near_link or link
    links = {"state": link, "replicas": across, "near": near}
    calls = mirrored(order)
    by_moment: dict[int, list[PlannedEvent]] = {}
    for event in events:
        if event.op in COLLECTIVES:  # one after the previous step's end is at moment 0
            by_moment.setdefault(event.moment % (len(calls) + 1), []).append(event)
    now = reduced = 0.0
    free, busy = dict.fromkeys(links.values(), 0.0), dict.fromkeys(links.values(), 0.0)
    gathered: dict[int, float] = {}
    for moment, call in enumerate((*calls, None)):
        for event in by_moment.get(moment, ()):
            if event.op == "reduce_scatter":
                now = max(now, reduced)
            used, is_gather = links[event.axis], event.op in GATHERS
            seconds = used.seconds(event.op, event.nbytes, event.num_ranks)
            busy[used] += seconds
            free[used] = max(free[used], now, 0.0 if is_gather else reduced) + seconds
            if is_gather:
                gathered[event.unit] = free[used]
            else:
                reduced = free[used]
        if call is not None and call.enter:
            now = max(now, gathered.get(call.unit, 0.0))
        now += compute_s[moment]
    return Timing(
        " + ".join(dict.fromkeys(each.name for each in links.values())),
        sum(busy.values()),
        sum(compute_s),
        max(now, *free.values()),
        0.0 if across == link else busy[across],
    )
