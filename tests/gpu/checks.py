"""Checks of a sharded model that tests of one process and of several ranks share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import zerocore
from tests.distributed.values import own_of
from tests.gpu.training import VARIANTS, Branches, Stack, peers, run_step, shard, train

Sharded = tuple[Stack, torch.optim.Optimizer]


def make_sharded(device: torch.device, seed: int = 0, **options: object) -> Sharded:
    """A model whose values depend on the seed, and zerocore's AdamW."""
    model = Stack(VARIANTS[0]).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    zerocore.shard(model, units=[Branches], **options)
    return model, zerocore.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def bits(model: Stack, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies on the host of this rank's parameters and of the optimizer's states."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = own_of(param).detach().to("cpu", copy=True)
        states = optimizer.state[param]
        assert {"exp_avg", "exp_avg_sq"} <= set(states)
        for key, value in states.items():
            local = value.local() if hasattr(value, "local") else torch.as_tensor(value)
            found[f"{name} {key}"] = local.detach().to("cpu", copy=True)
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


def check_background_save(device: torch.device, folder: Path, stage: int) -> None:
    """A save holds the state at its call while training goes on; a load restores the same bits."""
    model, optimizer = make_sharded(device, stage=stage)
    saved = zerocore.Checkpoints(folder, model, optimizer, background=True)
    for step in range(3):
        run_step(model, optimizer, step)
    expected = bits(model, optimizer)
    saved.save(3)
    run_step(model, optimizer, 3)
    after = bits(model, optimizer)
    saved.wait()
    other, its_optimizer = make_sharded(device, seed=1, stage=stage)
    assert zerocore.Checkpoints(folder, other, its_optimizer).load() == 3
    assert_same_bits(bits(other, its_optimizer), expected)
    run_step(other, its_optimizer, 3)
    assert_same_bits(bits(other, its_optimizer), after)


def check_wire(device: torch.device, stage: int, precision: zerocore.MixedPrecision) -> None:
    """Training is near that of one process; gathers or reductions move at most half the bytes."""
    expected, all_nbytes = train_recorded(device, 3, zerocore.MixedPrecision())
    losses, nbytes = train_recorded(device, stage, precision)
    torch.testing.assert_close(losses, expected, rtol=5e-2, atol=0.0)
    assert losses[-1] < losses[0]
    narrow = "reduce_scatter" if precision.gather_dtype is None else "all_gather"
    assert 0 < nbytes[narrow] <= all_nbytes[narrow] / 2


def train_recorded(
    device: torch.device, stage: int, precision: zerocore.MixedPrecision
) -> tuple[torch.Tensor, Counter[str]]:
    """Losses, and the bytes of each kind of collective."""
    with peers():
        model = shard(Stack(replace(VARIANTS[0], precision=precision)).to(device), stage)
        with zerocore.reporting.record_events(model) as events:
            losses = train(model)
    nbytes: Counter[str] = Counter()
    for event in events:
        nbytes[event.op] += event.nbytes
    return losses, nbytes
