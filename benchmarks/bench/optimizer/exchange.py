"""Measures how much of Muon's exchange its computation hides, on a rank of an emulated link."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from bench.lib.models import GPT
from bench.lib.systems import import_zerocore
from bench.optimizer.muon import SIZE, own_step

LATENCY_S = 20e-6


@dataclass(frozen=True)
class HiddenExchange:
    """Medians over the steps on one link.

    `share` is the time that the exchange uses the link, over a step's time without delay;
    `num_rounds` counts a step's rounds, each with an all-to-all to owners and one back.
    """

    share: float
    bandwidth: float
    transfer_s: float
    waited_s: float
    step_s: float
    num_rounds: int

    @property
    def hidden(self) -> float:
        """The hidden share: 1 - waited / transferred."""
        return 1 - self.waited_s / self.transfer_s


def measure_hidden(shares: list[float], rounds: int) -> list[HiddenExchange]:
    """Measures steps on links on which the exchange takes these shares of an undelayed step."""
    zerocore = import_zerocore()
    link = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    link.link = zerocore.emulation.link("inf", 0.0)
    torch.manual_seed(0)
    own = own_step(GPT(SIZE))
    for _ in range(2):
        own.step()
    free_s = median(_seconds(own.step) for _ in range(rounds))
    found = []
    for share in shares:
        bandwidth = own.choice.sent_nbytes / (share * free_s)
        link.link = zerocore.emulation.link(bandwidth, LATENCY_S)
        own.step()
        steps = []
        for _ in range(rounds):
            with zerocore.reporting.record_events(own.model) as events:
                step_s = _seconds(own.step)
            exchange = [event for event in events if event.op == "all_to_all"]
            moved = zerocore.reporting.events.transfers(
                exchange, zerocore.reporting.events.ONE_QUEUE
            )
            transfer_s = sum(event.done_ns - begin_ns for event, begin_ns in moved) / 1e9
            waited_s = sum(event.wait_ns for event in exchange) / 1e9
            steps.append((transfer_s, waited_s, step_s))
        middle = [median(figures) for figures in zip(*steps, strict=True)]
        found.append(HiddenExchange(share, bandwidth, *middle, own.choice.num_rounds))
    return found


def _seconds(step: object) -> float:
    assert callable(step)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
