"""Losses in bf16 beside those of FSDP2 with the same policy, and of DDP under autocast."""

from __future__ import annotations

import importlib

import pytest

from tests.distributed.harness import run_ranks

NUM_STEPS = 10
Losses = dict[str, list[float]]


def train_all(accumulate: int, clip: float | None, optimizer: str) -> Losses:
    """The losses of each system in benchmarks/parity.py, with a smaller model."""
    parity = importlib.import_module("parity")
    size = parity.GPTSize(num_blocks=2, width=64, num_heads=2, vocab_size=256, sequence=32, batch=2)
    recipe = parity.Recipe("bf16", accumulate, clip, optimizer)
    return {s.label: parity.train(s, size, NUM_STEPS, recipe) for s in parity.COMPARED}


def difference(losses: list[float], others: list[float]) -> float:
    return max(abs(own - other) / other for own, other in zip(losses, others, strict=True))


@pytest.mark.parametrize(
    ("accumulate", "clip", "optimizer", "bound"),
    # FSDP2 sums the squares of the norm in another order.
    [
        pytest.param(1, None, "torch", 1e-4, marks=pytest.mark.nightly),
        (2, 1.0, "zerocore", 1e-3),
    ],
)
def test_losses(accumulate: int, clip: float | None, optimizer: str, bound: float) -> None:
    for modules in ("rich", "typer"):
        pytest.importorskip(modules)
    losses = run_ranks(train_all, 2, accumulate, clip, optimizer, timeout=120)[0]
    assert losses["FSDP2"][-1] < losses["FSDP2"][0] - 0.7
    assert difference(losses["FSDP2"], losses["DDP"]) > 0  # not the same arithmetic
    for stage in range(4):
        own = losses[f"zerocore stage {stage}"]
        assert difference(own, losses["FSDP2"]) <= bound
        assert difference(own, losses["DDP"]) <= 2e-2
