"""``torch.func.jvp`` of a sharded model, and a backward through what it returns (MeanFlow)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


class Velocity(nn.Module):
    """Of a point and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.SiLU())
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.cat([x, time], -1)))
        return self.last(self.middle(x))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    """The mean velocity against that and its derivative along the path."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, velocity = (torch.randn(4, 8, generator=generator) for _ in range(2))
    time = torch.rand(4, 1, generator=generator)
    mean, slope = torch.func.jvp(model, (x, time), (velocity, torch.ones_like(time)))
    assert slope.shape == mean.shape
    return (mean - (velocity - time * slope).detach()).square().mean()


def train(model: Any, ranks: range) -> list[float]:
    """Losses of the first rank of four steps; gradients are those of the mean over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        for rank in ranks:
            loss = loss_of(model, step, rank)
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses[:: len(ranks)]


def make() -> nn.Module:
    torch.manual_seed(0)
    return Velocity()


def fully_sharded(**options: Any) -> Any:
    model: Any = make()
    for part in (model.first, model.middle, model.last):
        zerocore_fsdp.fully_shard(part, **options)
    return zerocore_fsdp.fully_shard(model, **options)


def forward_mode() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = range(rank, rank + 1)
    truth = train(make(), range(world_size)) if rank == 0 else None
    for stage in range(4):
        found = train(zerocore.shard(make(), stage=stage), order)
        assert truth is None or found == pytest.approx(truth, rel=2e-5), stage
    for reshards in (True, False):
        found = train(fully_sharded(reshard_after_forward=reshards), order)
        assert truth is None or found == pytest.approx(truth, rel=2e-5)


def narrow() -> None:
    """Layers compute in bfloat16, as jvp does."""
    mixed = zerocore.MixedPrecision(torch.bfloat16, torch.float32)
    model = zerocore.shard(make(), stage=3, mixed_precision=mixed)
    losses = train(model, range(dist.get_rank(), dist.get_rank() + 1))
    assert all(torch.isfinite(torch.tensor(losses)))


def others_are_refused() -> None:
    model = zerocore.shard(make(), stage=3)
    x = torch.ones(4, 9)
    with pytest.raises(TypeError, match=r"torch\.func transforms"):
        torch.func.vmap(model)(x[:, None, :8], x[:, None, :1])
    with pytest.raises(TypeError, match=r"torch\.func transforms"):
        slope = torch.func.grad(lambda x: model(x, x[:, :1]).sum())
        torch.func.jvp(slope, (x[:, :8],), (x[:, :8],))
    loss_of(model, 0, 0).backward()


def backward_outside() -> None:
    """The backward of a call within vmap averages gradients as one of a plain call does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [torch.randn(4, 9, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def loss_of_each(model: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(model)(x[:, None, :8], x[:, None, :1]).square().mean()

    plain: Any = make()
    sum(loss_of_each(plain, x) / size for x in batches).backward()  # type: ignore[union-attr]
    for stage in range(4):
        model = zerocore.shard(make(), stage=stage)
        if stage == 0:
            loss_of_each(model, batches[rank]).backward()
        else:
            with zerocore.unsharded(model):
                loss_of_each(model, batches[rank]).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None, stage
            torch.testing.assert_close(full_of(param.grad), other.grad)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        train(model, range(rank, rank + 1))


def of_samples() -> None:
    """Gradients of each sample, and a Hessian's product, from the parameters of a model."""
    plain: Any = make()
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    for stage in range(4):
        model = zerocore.shard(make(), stage=stage)
        found = []
        for each in (model, plain):

            def loss(params: Any, x: Tensor, each: Any = each) -> Tensor:
                out = torch.func.functional_call(each, params, (x[None, :8], x[None, 8:]))
                return out.square().mean()

            params = dict(each.named_parameters())
            per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
            full = {name: full_of(p).detach() for name, p in params.items()}
            _, product = torch.func.jvp(lambda p: torch.func.grad(loss)(p, x[0]), (full,), (full,))
            found.append((per_sample, product))
        torch.testing.assert_close(*found)


def run_all() -> None:
    forward_mode()
    backward_outside()
    of_samples()
    narrow()
    others_are_refused()


@pytest.mark.one_by_day
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_forward_mode_goes_through_sharded_models(num_ranks: int) -> None:
    run_ranks(run_all, num_ranks, timeout=120)
