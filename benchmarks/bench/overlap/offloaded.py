"""How much of an update on the host, and of the way there and back, a step hides."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.lib.links import EMULATED_LATENCY_S, EMULATED_WORLD_SIZE, EmulatedLink
from bench.lib.models import BlockStack
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table
from bench.overlap.run import GOAL_RATIO, OverlapRun
from zerocore import Event, Offload, Timeline
from zerocore.common.events import HOST
from zerocore.common.links import set_emulated_host_link

HIDDEN_GOAL = 95.0
EVERYTHING = Offload(states="cpu", gradients="cpu", parameters="cpu", threads=1)
STATES = Offload(states="cpu", threads=1)


@dataclass(frozen=True)
class Hosted:
    """The parts on the host. A load and its gather take two units' time, hence `prefetch`."""

    label: str
    offload: Offload
    clip: float | None = None
    prefetch: int = 1


HOSTED = (
    Hosted("states", STATES),
    Hosted("states, clipped", STATES, clip=1.0),
    Hosted("states, gradients, parameters; prefetch 2", EVERYTHING, clip=1.0, prefetch=2),
)


@dataclass(frozen=True)
class HostWork:
    """Milliseconds of a step: transfers by the link's model, updates as they took."""

    total: float
    unavoidable: float  # of the unit that comes first in the forward, one of each kind
    waits: float  # of the compute, for this and for collectives


@dataclass
class Rounds:
    """Of one system, a figure a round, ms."""

    alone: list[float] = field(default_factory=list)  # forward and backward, nothing on the host
    device: list[float] = field(default_factory=list)  # a step with nothing on the host
    hosted: list[float] = field(default_factory=list)
    work: list[HostWork] = field(default_factory=list)
    waits_alone: list[float] = field(default_factory=list)


class Steps:
    """A sharded stack of blocks and its optimizer."""

    def __init__(self, run: OverlapRun, hosted: Hosted, offload: Offload | None) -> None:
        zerocore = import_zerocore()
        work, self._run = run.workload, run
        torch.manual_seed(0)
        stack: nn.Module = BlockStack(work.num_blocks, work.width, work.num_heads).to(run.dtype)
        self.model = zerocore.shard(stack, stage=3, prefetch=hosted.prefetch, offload=offload)
        self.optimizer = zerocore.optim.AdamW(
            self.model.parameters(), lr=1e-6, clip_grad_norm=hosted.clip
        )

    def step(self, updates: bool = True) -> None:
        """With `updates` of the weights, which may go on when this returns."""
        self.model(self._run.inputs).backward()
        if updates:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, updates: bool = True) -> float:
        """Milliseconds of a step among others like it."""
        count = self._run.workload.steps_per_round
        self.step(updates)
        start = time.perf_counter()
        for _ in range(count):
            self.step(updates)
        seconds = time.perf_counter() - start
        self.optimizer.synchronize()
        return seconds * 1e3 / count

    def events(self, count: int, updates: bool = True) -> list[Event]:
        """Of so many steps, of which the first one follows no update."""
        with import_zerocore().record_events(self.model) as events:
            for _ in range(count):
                self.step(updates)
            self.optimizer.synchronize()
        found: list[Event] = list(events)
        return found


def read_work(one: list[Event], three: list[Event]) -> HostWork:
    """The work of a steady step on the host, from the events of one step and of three.

    The unit that comes first in the forward is the last whose gradient arrives.
    """
    lasts: dict[str, dict[str, float]] = {}
    for event in on_host(three):
        lasts.setdefault(event.op, {})[event.unit] = (event.done_ns - event.issued_ns) / 1e6
    first = next(event.unit for event in on_host(three) if event.op == "host_update")
    return HostWork(
        total=(busy_ms(three) - busy_ms(one)) / 2,
        unavoidable=sum(by_unit[first] for by_unit in lasts.values()),
        waits=waits_of(one, three),
    )


def on_host(events: list[Event]) -> list[Event]:
    """Those of parts on the host."""
    return [event for event in events if event.op in HOST and event.done_ns >= 0]


def busy_ms(events: list[Event]) -> float:
    """How long they took, one after the other."""
    return sum(event.done_ns - event.issued_ns for event in on_host(events)) / 1e6


def waits_of(one: list[Event], three: list[Event]) -> float:
    """Milliseconds that the compute of a step among others waits."""
    return (sum(e.wait_ns for e in three) - sum(e.wait_ns for e in one)) / 2e6


class HostedRun:
    """Systems with parts on the host, beside the same with none; on the links of an overlap run."""

    def __init__(self, run: OverlapRun) -> None:
        assert isinstance(run.link, EmulatedLink)
        self.run = run
        self.rounds = {hosted: Rounds() for hosted in HOSTED}
        run.set_ratio(GOAL_RATIO)
        shard_nbytes = run.block_nbytes / EMULATED_WORLD_SIZE
        seconds = max(run.gather_ms(GOAL_RATIO) / 1e3 - EMULATED_LATENCY_S, 1e-6)
        link = import_zerocore().emulated.link(shard_nbytes / seconds, EMULATED_LATENCY_S)
        set_emulated_host_link(link)
        try:
            self.steps = {h: (Steps(run, h, None), Steps(run, h, h.offload)) for h in HOSTED}
        finally:
            set_emulated_host_link(None)

    def measure_round(self) -> None:
        """All systems in turn."""
        self.run.set_ratio(GOAL_RATIO)
        for hosted, (plain, offloaded) in self.steps.items():
            rounds = self.rounds[hosted]
            rounds.alone.append(plain.time(updates=False))
            rounds.hosted.append(offloaded.time())
            rounds.device.append(plain.time())
            rounds.work.append(read_work(offloaded.events(1), offloaded.events(3)))
            alone = (plain.events(count, updates=False) for count in (1, 3))
            rounds.waits_alone.append(waits_of(*alone))

    def timeline(self) -> Timeline:
        """Two steps with everything on the host."""
        zerocore, (_, offloaded) = import_zerocore(), self.steps[HOSTED[-1]]
        offloaded.step()
        with zerocore.trace(offloaded.model) as timeline:
            offloaded.step()
            offloaded.step()
            offloaded.optimizer.synchronize()
        timeline.label = f"{self.run.link.label}: stage 3, {HOSTED[-1].label}, two steps"
        found: Timeline = timeline
        return found

    def table(self) -> Table:
        """Hidden shares of the time that can be hidden, by step times and by waits."""
        found = ("exposed", "hidden %", "of possible %")
        columns = ["on the host", "alone", "step", "/ on the device", "work", *found]
        table = Table(
            f"{self.run.link.label}: a step with parts on the host",
            [*columns, "waits", "hidden %", "of possible %"],
            notes=self._notes(),
        )
        for hosted, rounds in self.rounds.items():
            table.add(*_row(hosted, rounds))
        table.add("wanted", *[""] * 6, f">= {HIDDEN_GOAL:.0f}", "", "", f">= {HIDDEN_GOAL:.0f}")
        return table

    def _notes(self) -> list[str]:
        ms = self.run.gather_ms(GOAL_RATIO)
        return [
            "EMULATED links: those of the table above, and one to the host on which a block's "
            f"shard takes {ms:.2f} ms in each direction, as long as a gather. Updates are real, by "
            "one thread.",
            "Alone: forward and backward without an update, with nothing on the host. Step: with "
            "the update, in a row of steps; beside the same with nothing on the host. Work: what "
            "transfers, sums of squares and updates take; exposed: step - alone, same round.",
            "Possible: all but one gradient's way to the host, its squares, one update and one "
            "block's way back, those of the block that comes first in the forward: its gradient "
            "comes last, and its weights are needed first. In each direction a link carries one "
            "block while another computes, so nothing else has to be exposed where blocks compute "
            "longer than these.",
            "Waits: from the timeline, less those of forward and backward alone.",
        ]

    def raw(self) -> dict[str, Any]:
        """Everything that was measured."""
        return {
            hosted.label: {
                "alone_ms": rounds.alone,
                "device_ms": rounds.device,
                "hosted_ms": rounds.hosted,
                "waits_alone_ms": rounds.waits_alone,
                "work_ms": [vars(work) for work in rounds.work],
            }
            for hosted, rounds in self.rounds.items()
        }


def hidden(work: HostWork, exposed: float) -> tuple[float, float]:
    """Percent of the work that was hidden, and of that which can be."""
    possible = work.total - work.unavoidable
    return (
        100 * (1 - exposed / work.total),
        100 * (1 - (exposed - work.unavoidable) / possible),
    )


def _row(hosted: Hosted, rounds: Rounds) -> list[str]:
    names = ("total", "unavoidable", "waits")
    work = HostWork(*(median(getattr(each, name) for each in rounds.work) for name in names))
    exposed = median(a - b for a, b in zip(rounds.hosted, rounds.alone, strict=True))
    waits = work.waits - median(rounds.waits_alone)
    beside = median(a / b for a, b in zip(rounds.hosted, rounds.device, strict=True))
    cells = [median(rounds.alone), median(rounds.hosted)]
    return [
        hosted.label,
        *(f"{ms:.1f}" for ms in cells),
        f"{beside:.3f}",
        f"{work.total:.1f}",
        f"{exposed:.1f}",
        *(f"{share:.1f}" for share in hidden(work, exposed)),
        f"{waits:.1f}",
        *(f"{share:.1f}" for share in hidden(work, waits)),
    ]
