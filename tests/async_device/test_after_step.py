"""Nothing overtakes the copies of an optimizer step whose states lie on the host.

The step only begins copies of weights to the device. Draws are a way to offload, a follower, and
streams that are late at random; the right values are those of the same draw on the CPU.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.offloading import ALL, BF16, BOTH, PARAMETERS, STATES, adamw

Values = dict[str, Tensor]
GUARD = 7.0  # what memory holds that a late copy must not reach


def own(model: Any) -> Values:
    return {name: param.local().cpu().clone() for name, param in model.named_parameters()}


def parked(model: Any, optimizer: Any) -> Values:
    with zerocore.parked(model, optimizer):
        fill_free_memory(model)
    return own(model)


def exported(model: Any, optimizer: Any) -> Values:
    found = {}
    for bucket in zerocore.export(model):
        found |= {name: value.cpu().clone() for name, value in bucket.items()}
        bucket.release()
    return found


def full(model: Any, optimizer: Any) -> Values:
    return dict(zerocore.full_state_dict(model, rank0_only=False))


def cloned(model: Any, optimizer: Any) -> Values:
    return own(zerocore.clone_sharded(model, lambda: nn.Sequential(*(Block() for _ in model))))


def loaded(model: Any, optimizer: Any) -> Values:
    """Other weights, which no late copy may cover."""
    state = {name: torch.full_like(p, 0.5) for name, p in full(model, optimizer).items()}
    zerocore.load_full_state_dict(model, state)
    return own(model)


def averaged(model: Any, optimizer: Any) -> Values:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return own(model)


def evaluated(model: Any, optimizer: Any) -> Values:
    with torch.no_grad():
        return {"loss": model(torch.ones(2, WIDTH, device=model.where)).square().mean().cpu()}


def stepped(model: Any, optimizer: Any) -> Values:
    run_step(model, optimizer, 7)
    return own(model)


FOLLOWERS: tuple[Callable[[nn.Module, Any], Values], ...] = (
    parked,
    exported,
    full,
    cloned,
    loaded,
    averaged,
    evaluated,
    stepped,
)


def fill_free_memory(model: Any) -> None:
    """Takes what was freed: a late copy would change it, and its own bytes are not of the model."""
    tensors = [torch.full((numel,), GUARD, device=model.where) for numel in (512, 1024, 4096) * 8]
    assert all(bool((tensor == GUARD).all()) for tensor in tensors)


def run_step(model: Any, optimizer: Any, index: int) -> None:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + dist.get_rank()) / (1 + index)
    x = x.to(model.where)
    (model(x) - x.flip(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(device: torch.device, **options: Any) -> Any:
    """The parameters are on the host: `where` is the device that computes."""
    model: Any = zerocore.shard(make_model(device), units=[Block], **options)
    model.where = device
    return model


def run_draw(device: torch.device, seed: int) -> Values:
    rng = random.Random(seed)
    stage = rng.choice((1, 2, 3))
    offload = rng.choice((STATES, BOTH, PARAMETERS, ALL)[: (1, 2, 4)[stage - 1]])
    mixed = rng.choice((None, BF16))
    model = make(device, stage=stage, offload=offload, mixed_precision=mixed)
    optimizer = adamw(model.parameters())
    for step in range(rng.choice((1, 2))):
        run_step(model, optimizer, step)
    follower = rng.choice(FOLLOWERS)
    try:
        found = follower(model, optimizer)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {follower.__name__}, stage {stage}") from error
    what = f"seed {seed}: {follower.__name__}, stage {stage}, {offload}, {mixed}"
    return {f"{what}: {name}": value for name, value in found.items()}


def compare(first: int, count: int) -> None:
    device, extension = start(True)
    for seed in range(first, first + count):
        extension.set_delays(seed, 0.7, 2000)
        found = run_draw(device, seed)
        extension.set_delays(seed, 0.0, 0)
        for name, value in run_draw(torch.device("cpu"), seed).items():
            # Sums in another order are other bits, of which bfloat16 has few.
            close = {"rtol": 2e-2, "atol": 2e-3} if "bfloat16" in name else {}
            torch.testing.assert_close(
                found[name], value, msg=lambda m, name=name: f"{name}: {m}", **close
            )


def end_early(count: int) -> None:
    """The model ends right behind a step; memory that it had is not written any more."""
    device, extension = start(True)
    for seed in range(count):
        extension.set_delays(seed, 0.7, 2000)
        model = make(device, stage=3, offload=STATES)
        optimizer = adamw(model.parameters())
        run_step(model, optimizer, 0)
        del model, optimizer
        gc.collect()
        tensors = [torch.full((numel,), GUARD, device=device) for numel in (512, 1024, 4096) * 8]
        extension.synchronize()
        changed = sum(int((tensor != GUARD).sum()) for tensor in tensors)
        assert changed == 0, f"seed {seed}: {changed} elements"


@pytest.mark.parametrize(("first", "count"), [*by_night((0, 60)), (500, 16)])
def test_values_are_those_of_the_step(first: int, count: int) -> None:
    run_ranks(compare, 2, first, count, launch="torchrun", timeout=60 + 2 * count)


def test_a_model_that_ends_behind_a_step() -> None:
    run_ranks(end_early, 2, 20, launch="torchrun", timeout=120)
