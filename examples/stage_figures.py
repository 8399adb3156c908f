"""Collects memory and collectives of one stage on this rank, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

import zerocore

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "pool")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class CollectiveFigures:
    """The number, bytes and times of one kind of collective in a training step.

    `nbytes` counts full buckets. `in_flight_ms` is the time during which any of the collectives was
    in flight, `exposed_ms` the time for which this rank stood waiting.
    """

    num_calls: float
    nbytes: float
    predicted_num_calls: int
    predicted_nbytes: int
    in_flight_ms: float
    exposed_ms: float

    @property
    def hidden_percent(self) -> float | None:
        """Share of the time in flight that compute covered; None where nothing was in flight."""
        if self.in_flight_ms <= 0:
            return None
        return 100 * max(0.0, 1 - self.exposed_ms / self.in_flight_ms)


@dataclass(frozen=True)
class StageFigures:
    """A stage's bytes on this rank by kind, and its collectives of a step by name."""

    stage: int
    num_recorded_steps: int
    measured_nbytes: dict[str, int]
    predicted_nbytes: dict[str, int]
    collectives: dict[str, CollectiveFigures]


def collect_figures(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    events: Iterable[zerocore.reporting.Event],
    *,
    stage: int,
    num_steps: int,
) -> StageFigures:
    """Collects the figures of a sharded `model` whose last `num_steps` steps recorded `events`.

    Call it after a step and before `zero_grad`, while there are gradients to count.
    """
    measured = zerocore.memory_usage(model, optimizer)
    predicted = zerocore.planning.predict_memory(model, stage=stage)
    return StageFigures(
        stage,
        num_steps,
        {kind: getattr(measured, kind) for kind in MEMORY_KINDS},
        {kind: getattr(predicted, kind) for kind in MEMORY_KINDS},
        _summarise_events(list(events), zerocore.planning.predict_events(model), num_steps),
    )


def _in_flight_ns(events: list[zerocore.reporting.Event]) -> int:
    """Returns the time during which at least one of `events` was in flight.

    A sum over the events would count time in a queue once for each event that waits there, and
    flatter the share that is hidden.
    """
    covered, end = 0, 0
    for issued, done in sorted((event.issued_ns, event.done_ns) for event in events):
        covered += max(0, done - max(issued, end))  # done is -1 if unknown
        end = max(end, done)
    return covered


def _summarise_events(
    events: list[zerocore.reporting.Event], predicted: list[tuple[str, str, int]], num_steps: int
) -> dict[str, CollectiveFigures]:
    figures = {}
    for op in COLLECTIVES:
        seen = [event for event in events if event.op == op]
        planned = [nbytes for planned_op, _, nbytes in predicted if planned_op == op]
        if not seen and not planned:
            continue
        figures[op] = CollectiveFigures(
            num_calls=len(seen) / num_steps,
            nbytes=sum(event.nbytes for event in seen) / num_steps,
            predicted_num_calls=len(planned),
            predicted_nbytes=sum(planned),
            in_flight_ms=_in_flight_ns(seen) / num_steps / 1e6,
            exposed_ms=sum(event.wait_ns for event in seen) / num_steps / 1e6,
        )
    return figures
