"""Collectives of the program's own that write to parameters: as on a plain model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks

BF16 = torch.bfloat16
Write = Callable[[Tensor], Any]
WORLD_SIZES = [2, 3, pytest.param(4, marks=pytest.mark.nightly)]


WRITES: dict[str, Write] = {
    "sum": lambda p: dist.all_reduce(p),
    "average": lambda p: (dist.all_reduce(p), p.div_(dist.get_world_size())),
    "later": lambda p: dist.all_reduce(p, dist.ReduceOp.MAX, async_op=True).wait(),
    "by name": lambda p: dist.all_reduce(tensor=p, op=dist.ReduceOp.SUM),
    "broadcast": lambda p: dist.broadcast(p, src=1),
    "coalesced": lambda p: dist.all_reduce_coalesced([p]),
}
REFUSED: dict[str, Write] = {
    "reduce": lambda p: dist.reduce(p, 0),
    "scatter": lambda p: dist.scatter(p, [p.detach()] * 2 if dist.get_rank() == 0 else None),
    "recv": lambda p: dist.recv(p, 0) if dist.get_rank() else None,
}
SEEN: dict[str, Callable[[Any], Tensor]] = {
    "parameter": lambda p: p,
    "data": attrgetter("data"),
    "detach": lambda p: p.detach(),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def write(model: nn.Module, writes: Write, seen: Callable[[Any], Tensor]) -> None:
    with torch.no_grad():
        for param in model.parameters():
            writes(seen(param))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()


def same_as_plain(stage: int, precise: bool) -> None:
    precision = None if precise else zerocore.MixedPrecision(torch.bfloat16)
    limit = 1e-6 if precise else 0.05
    for name, writes in WRITES.items():
        for way, seen in SEEN.items():
            plain, model = build(), zerocore.shard(build(), stage=stage, mixed_precision=precision)
            for each in (plain, model):
                write(each, writes, seen)
            for stepped in (False, True):
                state = zerocore.full_state_dict(model, rank0_only=False)
                for key, value in plain.state_dict().items():
                    error = f"{name} of {way}, {key}, {stepped=}"
                    assert torch.allclose(state[key], value, rtol=limit, atol=limit), error
                for each in (plain, model):
                    train(each)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", range(4))
def test_collectives_that_give_all_ranks_the_same(world_size: int, stage: int) -> None:
    run_ranks(same_as_plain, world_size, stage, True)


@pytest.mark.parametrize("stage", (1, 3))
def test_with_main_weights(stage: int) -> None:
    run_ranks(same_as_plain, 2, stage, False)


def exact_by_collectives(stage: int) -> None:
    """Main weights keep every bit, forwards see the values, and copies are read as they are."""
    model = zerocore.shard(build(), stage=stage, mixed_precision=zerocore.MixedPrecision(BF16))
    before = zerocore.full_state_dict(model, rank0_only=False)
    write(model, lambda p: dist.broadcast(p, src=0), lambda p: p)
    for key, value in zerocore.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, before[key])
    x, plain = torch.ones(3, 4), build().bfloat16()
    write(model, lambda p: dist.all_reduce(p), lambda p: p.data)
    write(plain, lambda p: dist.all_reduce(p), lambda p: p.data)
    assert torch.allclose(model(x).float(), plain(x.bfloat16()).float(), rtol=0.05, atol=0.05)
    copied = model[0].weight.detach().clone()
    total = copied.sum()
    dist.all_reduce(copied)
    assert torch.allclose(copied.sum(), dist.get_world_size() * total)
    if stage == 0:
        assert torch.equal(copied.t(), copied.full_tensor().t())


@pytest.mark.parametrize("stage", range(4))
def test_main_weights_keep_their_bits(stage: int) -> None:
    run_ranks(exact_by_collectives, 2, stage)


def refuse_views_and_groups() -> None:
    model = zerocore.shard(build(), stage=3)
    pair = dist.new_group([0, 1])
    with torch.no_grad():
        for view in (model[0].weight.view(-1), model[0].weight[0], model[0].weight.unsqueeze(0)):
            with pytest.raises(RuntimeError, match=r"all_reduce.* would change a copy"):
                dist.all_reduce(view)
        if dist.get_rank() < 2:  # the members alone call it
            with pytest.raises(TypeError, match=r"ranks \[0, 1\] alone"):
                dist.all_reduce(model[0].weight, group=pair)
        dist.all_reduce(model[0].weight, group=dist.group.WORLD)


def test_views_and_groups_of_some_ranks_are_refused() -> None:
    run_ranks(refuse_views_and_groups, 3)


def refuse(stage: int) -> None:
    model = zerocore.shard(build(), stage=stage)
    for name, writes in REFUSED.items():
        if name == "recv" and dist.get_rank() == 0:
            continue
        for seen in SEEN.values():
            with pytest.raises(TypeError, match=r"'0.weight'.*other values|only see this rank"):
                write(model, writes, seen)
    train(model)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_collectives_that_give_each_rank_its_own(stage: int) -> None:
    run_ranks(refuse, 2, stage)
