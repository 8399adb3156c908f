"""Leaves out one wait at a time, with the stream that is waited for late: does it show?

`python -m tests.async_device.faults BLOCKS [STAGE ...] [--offload]` tries every wait of a step of a
model of so many units, and says what became of it; with states on the host, at stages 2 and 3 then
also with gradients, at 3 with parameters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of
from zerocore.tensor import pending_host_updates

Lags = tuple[int, int, int]
# How late a task begins: of the stream that does not wait, of the one that it should wait for, and
# of the others: what is not ordered comes before the others have begun, while they are at work, or
# lasts until they come. Copies are few: those that should be waited for come when all else is done.
LAGS_US: tuple[Lags, ...] = (
    *((0, 3_000, 3_000), (200, 3_000, 3_000)),
    *((1_000, 6_000, 6_000), (10_000, 1_000, 1_000)),
)
LAGS_OF_COPIES_US: tuple[Lags, ...] = ((0, 150_000, 0), (0, 3_000, 3_000), (20_000, 0, 0))
NO_LAGS = (0, 0, 0)
ROLES = ("all_gather", "reduce_scatter")
COPIES = ("device_to_host", "host_to_device")
HOST = "host"
STATES = zerocore.Offload(states="cpu")
PARAMETERS = zerocore.Offload(states="cpu", parameters="cpu")
GRADIENTS = zerocore.Offload(states="cpu", gradients="cpu")


@dataclass(frozen=True)
class Wait:
    """The place of a wait among those of a step, and the roles of its two streams.

    The host's own waits for events are numbered by themselves.
    """

    number: int
    waiter: str
    source: str


class Trial:
    """Steps of a model, of which one may lack a wait."""

    def __init__(
        self, device: torch.device, extension: Any, num_blocks: int, options: dict[str, Any]
    ) -> None:
        self.device, self.extension = device, extension
        model = make_model(device, num_blocks)
        self.model = zerocore.shard(model, units=[Block], **_with_meshes(options))
        offloads = options.get("offload") is not None
        make = zerocore.optim.AdamW if offloads else torch.optim.AdamW
        self.num_backwards = 2 if offloads else 1  # a second one adds to what is on its way
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=1e-2)
        engine = state_of(self.model).engine
        roles = (*ROLES, *COPIES) if offloads else ROLES
        self.roles = {extension.id_of_handle(engine.stream_handle(role)): role for role in roles}
        self.roles[extension.current_stream()] = "compute"

    def step(self, backward_done: Callable[[], None] | None = None) -> torch.Tensor:
        """The loss, on the device."""
        x = torch.linspace(-1, 1, 4 * WIDTH, device=self.device).view(4, WIDTH)
        x = x * (1 + torch.distributed.get_rank())
        for _ in range(self.num_backwards):
            loss = (self.model(x) - x.flip(1)).square().mean()
            loss.backward()
        if backward_done is not None:
            backward_done()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def set_lags(self, dropped: Wait | None, lags: Lags) -> None:
        """Makes streams late."""
        for stream, role in self.roles.items():
            lag = lags[2]
            if dropped is not None and role in (dropped.waiter, dropped.source):
                lag = lags[0] if role == dropped.waiter else lags[1]
            self.extension.set_lag(stream, lag)

    def run(self, dropped: Wait | None, lags: Lags = NO_LAGS) -> tuple[list[float], list[Wait]]:
        """The losses of some steps, one of them without the wait, and the waits it made.

        Two steps go before: while the pool has no memory or gives it anew, a gather begins behind
        all that compute is behind, and would not miss a wait of its own.
        """

        def begin() -> None:
            self.set_lags(dropped, lags)

        losses = [self.step(), self.step(), self.step(begin)]
        pending_host_updates.finish()  # the host's waits of that step are not numbered
        number = -1 if dropped is None else dropped.number
        of_host = dropped is not None and dropped.waiter == HOST
        self.extension.begin_waits(*((-1, number) if of_host else (number, -1)))
        losses.append(self.step())
        pending_host_updates.finish()  # those of this step are
        waits = self.extension.end_waits()
        self.extension.synchronize()
        self.set_lags(None, NO_LAGS)
        losses += [self.step(), self.step()]
        roles = {**self.roles, -1: HOST}
        names = [(roles.get(a, "other"), roles.get(b, "other")) for a, b in waits]
        of_host = [name for name in names if name[0] == HOST]
        of_streams = [name for name in names if name[0] != HOST]
        found = [Wait(i, *pair) for each in (of_streams, of_host) for i, pair in enumerate(each)]
        return torch.stack(losses).tolist(), found


def _with_meshes(options: dict[str, Any]) -> dict[str, Any]:
    """``other_mesh`` names units on a group of their own; both use the same streams."""
    names = options.get("other_mesh", ())
    if not names:
        return options
    mesh = zerocore.ParameterMesh(torch.distributed.new_group())
    groups = {f"{name}.*": mesh for name in names}
    return {**{k: v for k, v in options.items() if k != "other_mesh"}, "groups": groups}


def try_waits(
    num_blocks: int, options: dict[str, Any], only_some: bool = False
) -> list[tuple[Wait, bool]]:
    """Each wait of a step (or the first and last of a kind), and whether leaving it out shows.

    With offload only those that it adds: of copies, and of the host.
    """
    device, extension = start(on_device=True)

    def run(*faults: Any) -> tuple[list[float], list[Wait]]:
        trial = Trial(device, extension, num_blocks, options)
        try:
            return trial.run(*faults)
        except (RuntimeError, ValueError) as error:
            if "the forward raised on" not in str(error):
                raise
            extension.end_waits()  # a rank has found that it has other weights: it shows
            extension.synchronize()
            trial.set_lags(None, NO_LAGS)
            return [math.nan], []

    expected, waits = run(None)
    if "offload" in options:
        waits = [wait for wait in waits if {wait.waiter, wait.source} & {*COPIES, HOST}]

    def shows(wait: Wait) -> bool:
        lags_us = LAGS_OF_COPIES_US if wait.source in COPIES else LAGS_US
        if only_some:
            lags_us = lags_us[: 1 if "offload" in options else 2]
        trials = [run(wait, lags)[0] for lags in lags_us]  # on all ranks, whatever they show
        return any(repr(losses) != repr(expected) for losses in trials)

    return [(wait, shows(wait)) for wait in (ends_of_each_kind(waits) if only_some else waits)]


def ends_of_each_kind(waits: list[Wait]) -> list[Wait]:
    """The first and the last of those with the same roles."""
    kinds: dict[tuple[str, str], list[Wait]] = {}
    for wait in waits:
        kinds.setdefault((wait.waiter, wait.source), []).append(wait)
    return [wait for kind in kinds.values() for wait in dict.fromkeys((kind[0], kind[-1]))]


def options_of(stage: int, offloads: bool) -> list[dict[str, Any]]:
    """The options that are tried at a stage."""
    if offloads:
        parts = [STATES] + [GRADIENTS] * (stage >= 2) + [PARAMETERS] * (stage == 3)
        return [{"stage": stage, "offload": offload} for offload in parts]
    return [
        {"stage": stage, "communication": zerocore.Communication(prefetch=prefetch)}
        for prefetch in ((0, 1) if stage else (1,))
    ]


def main() -> None:
    """A line for each wait."""
    num_blocks, *stages = (int(each) for each in sys.argv[1:] if each != "--offload")
    for stage in stages or range(4):
        for options in options_of(stage, "--offload" in sys.argv):
            ranks = run_ranks(try_waits, 2, num_blocks, options, launch="torchrun", timeout=500)
            for (wait, *shown), (_, *other) in zip(*ranks, strict=True):
                verdict = "shows" if any(shown + other) else "DOES NOT SHOW"
                print(f"{options}: {wait} {verdict}", flush=True)


if __name__ == "__main__":
    main()
