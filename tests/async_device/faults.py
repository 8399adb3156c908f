"""Leaves out one wait at a time, with the stream that is waited for late: does it show?

`python -m tests.async_device.faults BLOCKS [STAGE ...]` tries every wait of a step of a model of so
many units, and says what became of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

# How late each task begins, of the stream that does not wait and of the others: what is not ordered
# comes before the others have begun, while they are at work, or lasts until they come.
LAGS_US = ((0, 3_000), (200, 3_000), (1_000, 6_000), (10_000, 1_000))
ROLES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Wait:
    """The place of a wait among those of a step, and the roles of its two streams."""

    number: int
    waiter: str
    source: str


class Trial:
    """Steps of a model, of which one may lack a wait."""

    def __init__(
        self, device: torch.device, extension: Any, num_blocks: int, stage: int, prefetch: int
    ) -> None:
        self.device, self.extension = device, extension
        self.model = zerocore.shard(
            make_model(device, num_blocks), stage=stage, units=[Block], prefetch=prefetch
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


def try_waits(
    num_blocks: int, stage: int, prefetch: int, only_some: bool = False
) -> list[tuple[Wait, bool]]:
    """Each wait of a step (or the first and last of a kind), and whether leaving it out shows."""
    device, extension = start(on_device=True)

    def run(*faults: Any) -> tuple[list[float], list[Wait]]:
        return Trial(device, extension, num_blocks, stage, prefetch).run(*faults)

    expected, waits = run(None)

    def shows(wait: Wait) -> bool:
        trials = [
            run(wait, lags)[0] for lags in (LAGS_US[:2] if only_some else LAGS_US)
        ]  # on all ranks, whatever they show
        return any(repr(losses) != repr(expected) for losses in trials)

    return [(wait, shows(wait)) for wait in (ends_of_each_kind(waits) if only_some else waits)]


def ends_of_each_kind(waits: list[Wait]) -> list[Wait]:
    """The first and the last of those with the same roles."""
    kinds: dict[tuple[str, str], list[Wait]] = {}
    for wait in waits:
        kinds.setdefault((wait.waiter, wait.source), []).append(wait)
    return [wait for kind in kinds.values() for wait in dict.fromkeys((kind[0], kind[-1]))]


def main() -> None:
    """A line for each wait."""
    num_blocks, *stages = (int(each) for each in sys.argv[1:])
    for stage in stages or range(4):
        for prefetch in (0, 1) if stage else (1,):
            arguments = (num_blocks, stage, prefetch)
            ranks = run_ranks(try_waits, 2, *arguments, launch="torchrun", timeout=500)
            for (wait, *shown), (_, *other) in zip(*ranks, strict=True):
                verdict = "shows" if any(shown + other) else "DOES NOT SHOW"
                print(f"stage {stage} prefetch {prefetch}: {wait} {verdict}", flush=True)


if __name__ == "__main__":
    main()
