"""Plays random models on a schedule, as the engine would, and keeps what must hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.bindings import _C_testing
from zerocore._C import CallEvent

# A call tree: (unit, calls inside of it).
Call = tuple[int, tuple["Call", ...]]


def random_tree(rng: random.Random, num_units: int, repeats: bool = True) -> list[Call]:
    """Every unit at least once, some again, some inside of others."""
    calls: list[Call] = []
    for unit in range(num_units):
        if calls and rng.random() < 0.25:
            parent, inside = calls.pop()
            calls.append((parent, (*inside, (unit, ()))))
        else:
            calls.append((unit, ()))
        if repeats and rng.random() < 0.2:
            calls.append((rng.randrange(unit + 1), ()))
    return calls


def order_of(calls: list[Call] | tuple[Call, ...]) -> list[CallEvent]:
    """The enters and exits of a call tree."""
    events: list[CallEvent] = []
    for unit, inside in calls:
        events += [CallEvent(True, unit), *order_of(inside), CallEvent(False, unit)]
    return events


@dataclass
class Driver:
    """One rank: a schedule, what is resident, and every collective it issued."""

    schedule: _C_testing.Schedule
    releases: bool = True
    resident: set[int] = field(default_factory=set)
    collectives: list[tuple[str, int]] = field(default_factory=list)
    max_resident: int = 0

    def apply(self, actions: list[_C_testing.Action]) -> None:
        for action in actions:
            if action.kind == "unshard":
                assert action.unit not in self.resident
                self.resident.add(action.unit)
            elif action.kind == "reshard":
                self.resident.remove(action.unit)
            if action.kind != "reshard":
                self.collectives.append((action.kind, action.unit))
            self.max_resident = max(self.max_resident, len(self.resident))

    def forward(
        self, calls: list[Call], skipped: frozenset[int] = frozenset(), grad: bool = True
    ) -> list[tuple[str, int, _C_testing.CallHandle]]:
        """One root forward; returns the calls' events for the backward."""
        self.apply(self.schedule.begin_pass(grad))
        tape: list[tuple[str, int, _C_testing.CallHandle]] = []
        self._run(calls, skipped, tape)
        self.apply(self.schedule.end_pass())
        return tape

    def _run(
        self,
        calls: list[Call] | tuple[Call, ...],
        skipped: frozenset[int],
        tape: list[tuple[str, int, _C_testing.CallHandle]],
    ) -> None:
        for unit, inside in calls:
            if unit in skipped:
                continue
            self.apply(self.schedule.enter(unit))
            assert unit in self.resident
            position = len(tape)
            self._run(inside, skipped, tape)
            assert unit in self.resident
            left = self.schedule.exit(unit)
            tape.insert(position, ("enter", unit, left.call))
            tape.append(("exit", unit, left.call))
            self.apply(left.actions)

    def backward(self, tapes: list[list[tuple[str, int, _C_testing.CallHandle]]]) -> None:
        """One backward through the passes, last first."""
        self.schedule.begin_backward()
        events = [event for tape in tapes for event in tape]
        left = {unit: 0 for _, unit, _ in events}
        for kind, unit, _ in events:
            left[unit] += kind == "enter"
        for kind, unit, handle in reversed(events):
            if kind == "exit":
                self.apply(self.schedule.pre_backward(handle))
                assert unit in self.resident
            else:
                left[unit] -= 1
                if left[unit] == 0:
                    self.apply(self.schedule.ready(unit))
        self.apply(self.schedule.end_backward())
        if self.releases:
            assert not self.resident
