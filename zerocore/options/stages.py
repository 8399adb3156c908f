"""The ZeRO stages as placements; no other Python module knows what a stage's number means."""

from __future__ import annotations

from typing import NamedTuple


class Placements(NamedTuple):
    """The parts of the state that are sharded; each rank holds the others in full."""

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
"""The stage that shards everything."""


def placements_of(stage: int) -> Placements:
    """Returns the parts of the state that a stage shards; KeyError for an unknown stage."""
    return _PLACEMENTS[stage]


def stages_above(stage: int) -> tuple[int, ...]:
    """Returns the stages that shard more, in ascending order."""
    return STAGES[STAGES.index(stage) + 1 :]
