"""Predicts the time of a step: plays the planned collectives on a modelled link."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore._C import CallEvent
from zerocore.links import Link

# (op, unit, nbytes, pool nbytes, moment), as the planner returns them.
PlannedEvent = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Timing:
    """A predicted step on one link; seconds.

    Attributes:
        link: the link's name.
        communication_s: time of all collectives, one after the other.
        compute_s: time of all operations, without communication.
        step_s: predicted step, with as much hidden as the order of collectives allows.
    """

    link: str
    communication_s: float
    compute_s: float
    step_s: float

    @property
    def bound_s(self) -> float:
        """No schedule is faster: the longer of communication and compute."""
        return max(self.communication_s, self.compute_s)

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
    flops: tuple[int, ...],
    flops_per_s: float,
    link: Link,
    world_size: int,
) -> Timing:
    """Plays one step: compute runs on, collectives queue on one link in the order of issue.

    A unit's forward and backward wait for its gather; a reduction waits for the one before, as
    the runtime has one in flight; the step ends when all are done. Optimizer and host time are
    not counted.

    Args:
        events: planned events of the step.
        order: calls of the forward; moments are numbered by it.
        flops: operations by moment.
        flops_per_s: operations per second that the layers reach.
        link: the link of this rank.
        world_size: number of ranks.
    """
    by_moment: dict[int, list[PlannedEvent]] = {}
    for event in events:
        by_moment.setdefault(event[4], []).append(event)
    now = link_free = communication = reduced = 0.0
    gathered: dict[int, float] = {}
    for moment in range(2 * len(order) + 1):
        for op, unit, nbytes, _, _ in by_moment.get(moment, ()):
            if op in ("unshard", "reshard"):
                continue
            if op == "reduce_scatter":
                now = max(now, reduced)
            seconds = link.seconds(op, nbytes, world_size)
            communication += seconds
            link_free = max(link_free, now) + seconds
            if op == "all_gather":
                gathered[unit] = link_free
            else:
                reduced = link_free
        starting = _unit_starting(order, moment)
        if starting is not None:
            now = max(now, gathered.get(starting, 0.0))
        now += flops[moment] / flops_per_s
    return Timing(link.name, communication, sum(flops) / flops_per_s, max(now, link_free))


def _unit_starting(order: tuple[CallEvent, ...], moment: int) -> int | None:
    """The unit whose forward or backward begins at a moment."""
    num_events = len(order)
    if moment < num_events:
        return order[moment].unit if order[moment].enter else None
    if moment < 2 * num_events:
        event = order[2 * num_events - 1 - moment]
        return None if event.enter else event.unit
    return None
