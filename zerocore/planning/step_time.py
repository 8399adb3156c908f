"""Predicts the time of a step: plays the planned collectives on a modelled link."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore._C import CallEvent, PlannedEvent
from zerocore.common.events import COLLECTIVES, GATHERS
from zerocore.common.links import Link
from zerocore.planning.activations import mirrored


@dataclass(frozen=True)
class Timing:
    """A predicted step on a link, or on one between shards and one between replicas; seconds.

    Attributes:
        link: the link's name; of two, both.
        communication_s: time of all collectives, one after the other.
        compute_s: time of all operations, without communication.
        step_s: predicted step, with as much hidden as the order of collectives allows.
        across_s: the part of ``communication_s`` that the link between replicas carries; 0 where
            that is the same link.
    """

    link: str
    communication_s: float
    compute_s: float
    step_s: float
    across_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """No schedule is faster: the longest of compute and what each link carries."""
        return max(self.communication_s - self.across_s, self.across_s, self.compute_s)

    @property
    def exposed_s(self) -> float:
        """Time that compute waits for communication."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """Share of the communication that compute hides, 1 where there is none."""
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
    """Plays one step: compute runs on, collectives queue on their link in the order of issue.

    A unit's forward and backward wait for its gather; a reduction waits for the one before, as
    the runtime has one in flight, and a sum over the replicas for the reduction whose shards it
    sums; the step ends when all are done. Optimizer and host time are not counted. Gathers that
    begin when the optimizer's step ends run under the next forward.

    Args:
        events: planned events of the step.
        order: calls of the forward; moments are numbered by it.
        compute_s: seconds of compute by moment.
        link: the link of this rank to those that it shares the state with.
        replica_link: its link to the other replicas; None for the same.
        near_link: its link to near ranks; None for the same.
    """
    across, near = replica_link or link, near_link or link
    links = {"state": link, "replicas": across, "near": near}
    calls = mirrored(order)
    by_moment: dict[int, list[PlannedEvent]] = {}
    for event in events:
        if event.op in COLLECTIVES:  # one behind the step before is there at the first moment
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
