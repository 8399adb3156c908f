"""Leaves out one wait at a time, with the stream that is waited for late: does it show?

`python -m tests.async_device.faults` tries every wait of a step and says what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

# How late each task begins, of the stream that does not wait and of the others: what is not ordered
# comes before the others have begun, or while they are at work.
LAGS_US = ((0, 3_000), (200, 3_000))
ROLES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Wait:
    """The place of a wait among those of a step, and the roles of its two streams."""

    number: int
    waiter: str
    source: str


class Trial:
    """Steps of a model, of which one may lack a wait."""

    def __init__(self, device: torch.device, extension: Any, stage: int, prefetch: int) -> None:
        self.device, self.extension = device, extension
        self.model = zerocore.shard(
            make_model(device, 3), stage=stage, units=[Block], prefetch=prefetch
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        engine = state_of(self.model).engine
        self.roles = {extension.id_of_handle(engine.stream_handle(role)): role for role in ROLES}
        self.roles[extension.current_stream()] = "compute"

    def step(self, backward_done: Callable[[], None] | None = None) -> torch.Tensor:
        """The loss, on the device."""
        x = torch.linspace(-1, 1, 4 * WIDTH, device=self.device).view(4, WIDTH)
        x = x * (1 + torch.distributed.get_rank())
        loss = (self.model(x) - x.flip(1)).square().mean()
        loss.backward()
        if backward_done is not None:
            backward_done()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def set_lags(self, dropped: Wait | None, lags: tuple[int, int]) -> None:
        """All streams but the one that does not wait are late."""
        for stream, role in self.roles.items():
            own = dropped is not None and role == dropped.waiter
            self.extension.set_lag(stream, lags[0] if own else lags[1])

    def run(
        self, dropped: Wait | None, lags: tuple[int, int] = (0, 0)
    ) -> tuple[list[float], list[Wait]]:
        """The losses of four steps, the second one without the wait, and the waits it made."""

        def begin() -> None:
            self.set_lags(dropped, lags)

        losses = [self.step(begin)]
        self.extension.begin_waits(-1 if dropped is None else dropped.number)
        losses.append(self.step())
        waits = self.extension.end_waits()
        self.extension.synchronize()
        self.set_lags(None, (0, 0))
        losses += [self.step(), self.step()]
        names = [(self.roles.get(a, "other"), self.roles.get(b, "other")) for a, b in waits]
        numbers = range(len(names))
        found = [Wait(i, *pair) for i, pair in zip(numbers, names, strict=True)]
        return torch.stack(losses).tolist(), found


def try_waits(stage: int, prefetch: int, every: int) -> list[tuple[Wait, bool]]:
    """Each wait of a step (or each `every`-th of a kind), and whether leaving it out shows."""
    device, extension = start(on_device=True)
    expected, waits = Trial(device, extension, stage, prefetch).run(None)

    def shows(wait: Wait) -> bool:
        trials = (Trial(device, extension, stage, prefetch).run(wait, lags) for lags in LAGS_US)
        return any([repr(losses) != repr(expected) for losses, _ in trials])  # all ranks run all

    return [(wait, shows(wait)) for wait in some_of_each_kind(waits, every)]


def some_of_each_kind(waits: list[Wait], every: int) -> Iterator[Wait]:
    """Each `every`-th of those with the same roles."""
    seen: dict[tuple[str, str], int] = {}
    for wait in waits:
        kind = (wait.waiter, wait.source)
        seen[kind] = seen.get(kind, 0) + 1
        if (seen[kind] - 1) % every == 0:
            yield wait


def main() -> None:
    """A line for each wait."""
    for stage in range(4):
        for prefetch in (0, 1) if stage else (1,):
            ranks = run_ranks(try_waits, 2, stage, prefetch, 1, launch="torchrun", timeout=500)
            for (wait, *shown), (_, *other) in zip(*ranks, strict=True):
                verdict = "shows" if any(shown + other) else "DOES NOT SHOW"
                print(f"stage {stage} prefetch {prefetch}: {wait} {verdict}", flush=True)


if __name__ == "__main__":
    main()
