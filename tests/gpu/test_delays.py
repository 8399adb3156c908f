"""Wherever a stream is delayed, training ends with the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.values import own_of
from tests.gpu.delays import CYCLES, RandomDelays, sleep
from tests.gpu.training import PRECISIONS, VARIANTS, Stack, Variant, peers, shard, train
from zerocore.model.state import state_of

SEEDS = range(8)
BY_NAME = {variant.name: variant for variant in (*VARIANTS, *PRECISIONS)}


def train_delayed(
    device: torch.device, variant: Variant, stage: int, prefetch: int, seed: int | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and this rank's shards; without delays if there is no seed."""
    with peers("20GB/s", "10us"):
        model = shard(Stack(variant).to(device), stage, prefetch, variant.accumulate)
        if seed is not None:
            delays = RandomDelays(state_of(model).engine, device, seed)
            model.pause = delays
        losses = train(model, micro_batches=variant.micro_batches)
        if seed is not None:
            assert delays.num_delays > 3
        shards = {name: own_of(p).cpu().clone() for name, p in model.named_parameters()}
        return losses, shards


@pytest.mark.parametrize(
    "name", ["plain", "all", "accumulates_sharded", "bf16_reduced", "bf16_full"]
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_delays_change_nothing(device: torch.device, stage: int, prefetch: int, name: str) -> None:
    variant = BY_NAME[name]
    losses, shards = train_delayed(device, variant, stage, prefetch, None)
    for seed in SEEDS if device.type == "cuda" else SEEDS[:2]:
        delayed_losses, delayed_shards = train_delayed(device, variant, stage, prefetch, seed)
        assert torch.equal(delayed_losses, losses), f"seed {seed}"
        different = [n for n, value in shards.items() if not torch.equal(delayed_shards[n], value)]
        assert not different, f"seed {seed}"


def test_a_missing_wait_is_found(cuda: torch.device) -> None:
    """The sleep is long enough to show a race: the same hand-over with and without its wait."""
    side = torch.cuda.Stream()
    for waits in (True, False):
        source = torch.zeros(1 << 16, device=cuda)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            sleep(cuda, max(CYCLES))
            source.fill_(1.0)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        copy = source.clone()
        torch.cuda.synchronize()
        assert bool((copy == 1.0).all()) == waits
