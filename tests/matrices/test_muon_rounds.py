"""Muon on an emulated link: bytes as planned, and each exchange before the work that hides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from zerocore.matrices import muon_rounds, ownership

SIZE, WORLD_SIZE = 24, 4
NUM_MATRICES = 4 * WORLD_SIZE  # one a rank in each of four rounds


def sharded() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(NUM_MATRICES)))
    return zerocore.shard(model, stage=3, units=["Linear"])


def test_the_next_exchange_is_issued_before_this_round_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "_MIN_ROUND_NBYTES", 512)
    issued_before: list[int] = []  # all-to-alls, when AdamW or Newton-Schulz iterations begin
    with zerocore.emulate(WORLD_SIZE, "1GB/s", "10us"):
        model = sharded()
        optimizer = zerocore.matrices.Muon(model.named_parameters(), lr=0.02)
        engine = zerocore.model.state.state_of(model).engine
        compute = muon_rounds.orthogonalise
        rest: Any = optimizer._adamw

        def note() -> None:
            issued_before.append(engine.counters["all_to_all"].count)

        def orthogonalise(batch: Tensor, *args: Any) -> Tensor:
            note()
            return compute(batch, *args)

        def update_rest(factor: Tensor | None) -> None:
            note()
            zerocore.optim.AdamW.update(rest, factor)

        monkeypatch.setattr(muon_rounds, "orthogonalise", orthogonalise)
        monkeypatch.setattr(rest, "update", update_rest)
        with zerocore.reporting.record_events(model) as events:
            model(torch.randn(3, SIZE)).square().mean().backward()
            optimizer.step()
        choice = optimizer.describe()
        exchanges = [event for event in events if event.op == "all_to_all"]
        assert all(event.done_ns > event.issued_ns for event in exchanges)
        assert sum(event.nbytes for event in exchanges) == choice.sent_nbytes
        assert len(exchanges) == 2 * choice.num_rounds == 8
    # AdamW runs under the first exchange. Then each round is computed when the next one's updates
    # are on their way, too, and the results of those before.
    assert issued_before == [1, 2, 4, 6, 7]
