"""The ZeRO stages as placements; the only Python that knows what a number stands for."""

from __future__ import annotations

from typing import NamedTuple


class Placements(NamedTuple):
    """The state that ranks share between them; each rank holds the rest as a whole."""

    optimizer: bool
    gradients: bool
    parameters: bool


_PLACEMENTS = {
    0: Placements(optimizer=False, gradients=False, parameters=False),
    1: Placements(optimizer=True, gradients=False, parameters=False),
    2: Placements(optimizer=True, gradients=True, parameters=False),
    3: Placements(optimizer=True, gradients=True, parameters=True),
}
STAGES = tuple(_PLACEMENTS)
HIGHEST_STAGE = STAGES[-1]
"""Shards all that can be."""


def placements_of(stage: int) -> Placements:
    """The state that a stage shards; raises KeyError if there is none."""
    return _PLACEMENTS[stage]


def stages_above(stage: int) -> tuple[int, ...]:
    """Stages that shard more, least first."""
    return STAGES[STAGES.index(stage) + 1 :]
