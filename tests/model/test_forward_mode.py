"""``torch.func`` on sharded models: jvp with a backward behind it, and transforms in forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Slopes(nn.Module):
    """Layers that add their slopes to what they give, before and behind a layer's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.jacrev(self.middle))(x).square().mean()
        y, pull = torch.func.vjp(self.last, self.middle(x * self.scale))
        return y + slope + pull(y)[0].square()


class Sloped(nn.Module):
    """The same between layers, computed again in the backward or not."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.slopes, self.recomputes = nn.Linear(8, 8), Slopes(), recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.recomputes and x.requires_grad:
            return checkpoint(self.slopes, x, use_reentrant=True).square().mean()
        return self.slopes(x).square().mean()


def sloped(recomputes: bool) -> Any:
    torch.manual_seed(0)
    return Sloped(recomputes)


def in_forwards() -> None:
    """The running call has the backward of what a transform calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for recomputes in (False, True):
        plain = sloped(recomputes)
        models = [
            zerocore.shard(sloped(recomputes), stage=stage, units=[Slopes, nn.Linear])
            for stage in range(4)
        ]
        models.append(sloped(recomputes))
        inner = models[-1].slopes
        for part in (inner.middle, inner.last, inner, models[-1].first, models[-1]):
            zerocore_fsdp.fully_shard(part)
        for _ in range(3):
            plain.zero_grad()
            sum(plain(x) / size for x in batches).backward()
            for model in models:
                with torch.no_grad():
                    torch.testing.assert_close(model(batches[rank]), plain(batches[rank]))
                model.zero_grad()
                model(batches[rank]).backward()
                for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(full_of(param.grad), other.grad)


def run_all() -> None:
    forward_mode()
    backward_outside()
    of_samples()
    in_forwards()
    narrow()
    others_are_refused()


@pytest.mark.one_by_day
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_forward_mode_goes_through_sharded_models(num_ranks: int) -> None:
    run_ranks(run_all, num_ranks, timeout=120)
