"""Leaves out one wait at a time, while the stream that it waits for is late: does it show?

`python -m tests.async_device.faults BLOCKS [STAGE ...] [--offload]` tries every wait of a step of a
model of BLOCKS units, and prints whether dropping it shows. `--offload` puts states on the host; at
stages 2 and 3 it also tries gradients there, at stage 3 parameters.
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
# How late tasks begin: on the stream that does not wait, on the one that it should wait for, and on
# the others. Unordered work then comes before the others begin, while they work, or goes on until
# they come. There are few copies: a copy that should be waited for comes after all other work.
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
    """A wait's number within its step, and the roles of its two streams.

    The host's waits for events have their own numbers.
    """

    number: int
    waiter: str
    source: str


class Trial:
    """Steps of a model, one of which may lack a wait."""

    def __init__(
        self, device: torch.device, extension: Any, num_blocks: int, options: dict[str, Any]
    ) -> None:
        self.device, self.extension = device, extension
        model = make_model(device, num_blocks)
        self.model = zerocore.shard(model, units=[Block], **_with_meshes(options))
        offloads = options.get("offload") is not None
        make = zerocore.optim.AdamW if offloads else torch.optim.AdamW
        self.num_backwards = 2 if offloads else 1  # the second adds to gradients under way
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=1e-2)
        engine = state_of(self.model).engine
        roles = (*ROLES, *COPIES) if offloads else ROLES
        self.roles = {extension.id_of_handle(engine.stream_handle(role)): role for role in roles}
        self.roles[extension.current_stream()] = "compute"

    def step(self, backward_done: Callable[[], None] | None = None) -> torch.Tensor:
        """Trains one step and returns the loss, on the device."""
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
        """Makes streams late: the waiter, the source and the others of a dropped wait."""
        for stream, role in self.roles.items():
            lag = lags[2]
            if dropped is not None and role in (dropped.waiter, dropped.source):
                lag = lags[0] if role == dropped.waiter else lags[1]
            self.extension.set_lag(stream, lag)

    def run(self, dropped: Wait | None, lags: Lags = NO_LAGS) -> tuple[list[float], list[Wait]]:
        """Returns the losses of some steps, one without the wait, and the waits of that step.

        Two steps come first: while the pool allocates memory, a gather begins after all that
        compute waits for, so dropping the gather's own wait would not show.
        """

        def begin() -> None:
            self.set_lags(dropped, lags)

        losses = [self.step(), self.step(), self.step(begin)]
        pending_host_updates.finish()  # before the waits of the next step are counted
        number = -1 if dropped is None else dropped.number
        of_host = dropped is not None and dropped.waiter == HOST
        self.extension.begin_waits(*((-1, number) if of_host else (number, -1)))
        losses.append(self.step())
        pending_host_updates.finish()  # while the waits of this step are counted
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
    """Gives the units that ``other_mesh`` names their own group, with the same streams."""
    names = options.get("other_mesh", ())
    if not names:
        return options
    mesh = zerocore.ParameterMesh(torch.distributed.new_group())
    groups = {f"{name}.*": mesh for name in names}
    return {**{k: v for k, v in options.items() if k != "other_mesh"}, "groups": groups}


def try_waits(
    num_blocks: int, options: dict[str, Any], only_some: bool = False
) -> list[tuple[Wait, bool]]:
    """Returns each wait of a step (or a kind's first and last), and whether dropping it shows.

    With offload it tries only the waits that offload adds: for copies, and of the host.
    """
    device, extension = start(on_device=True)

    def run(*faults: Any) -> tuple[list[float], list[Wait]]:
        trial = Trial(device, extension, num_blocks, options)
        try:
            return trial.run(*faults)
        except (RuntimeError, ValueError) as error:
            if "the forward raised on" not in str(error):
                raise
            extension.end_waits()  # a rank found that its weights differ: the fault shows
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
    """Returns the first and the last wait for each pair of roles."""
    kinds: dict[tuple[str, str], list[Wait]] = {}
    for wait in waits:
        kinds.setdefault((wait.waiter, wait.source), []).append(wait)
    return [wait for kind in kinds.values() for wait in dict.fromkeys((kind[0], kind[-1]))]


def options_of(stage: int, offloads: bool) -> list[dict[str, Any]]:
    """Returns the options to try at a stage."""
    if offloads:
        parts = [STATES] + [GRADIENTS] * (stage >= 2) + [PARAMETERS] * (stage == 3)
        return [{"stage": stage, "offload": offload} for offload in parts]
    return [
        {"stage": stage, "communication": zerocore.Communication(prefetch=prefetch)}
        for prefetch in ((0, 1) if stage else (1,))
    ]


def main() -> None:
    """Prints a line for each wait."""
    num_blocks, *stages = (int(each) for each in sys.argv[1:] if each != "--offload")
    for stage in stages or range(4):
        for options in options_of(stage, "--offload" in sys.argv):
            ranks = run_ranks(try_waits, 2, num_blocks, options, launch="torchrun", timeout=500)
            for (wait, *shown), (_, *other) in zip(*ranks, strict=True):
                verdict = "shows" if any(shown + other) else "DOES NOT SHOW"
                print(f"{options}: {wait} {verdict}", flush=True)


if __name__ == "__main__":
    main()
