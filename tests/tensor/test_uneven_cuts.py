"""Two nets of one model whose units are cut at other elements follow each other, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

Params = list[Any]


class Pair(nn.Module):
    """An online net with a head, and a target that follows it: BYOL, JEPA, a mean teacher."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.online = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 3)
        self.target = nn.Sequential(*(nn.Sequential(layer) for layer in make_layers()))
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.target(x)
        return (self.head(self.online(x)) - aim).square().mean()


def make_layers() -> list[nn.Module]:
    return [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3)]


def lerp(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.lerp_(o, 0.25)


def mul_add(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.data.mul_(0.75).add_(o.data, alpha=0.25)


def copied(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.data.copy_(o.data)


def assigned(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.data = t.data * 0.75 + o.data * 0.25


def assigned_online(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.data = 0.25 * o.data + t.data * 0.75


def foreach_lerp(target: Params, online: Params) -> None:
    torch._foreach_lerp_(target, online, 0.25)


def foreach_copy(target: Params, online: Params) -> None:
    torch._foreach_copy_(target, online)


def foreach_add(target: Params, online: Params) -> None:
    torch._foreach_mul_(target, 0.75)
    torch._foreach_add_(target, online, alpha=0.25)


def sliced(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t[:] = o


def of_averages(target: Params, online: Params) -> None:
    """In a list of clones, from which the target is set."""
    shadow = copy.deepcopy(target)
    for s, o in zip(shadow, online, strict=True):
        s.detach().mul_(0.75).add_(o.detach(), alpha=0.25)
    for t, s in zip(target, shadow, strict=True):
        t.copy_(s)


def difference(target: Params, online: Params) -> None:
    for t, o in zip(target, online, strict=True):
        t.sub_((t - o) * 0.25 + torch.dist(t, o) * 0)
        assert float((o - t).abs().max()) >= 0


WAYS: list[Callable[[Params, Params], None]] = [
    *(lerp, mul_add, copied, assigned, assigned_online, foreach_lerp, foreach_copy, foreach_add),
    *(sliced, of_averages, difference),
]


def follow(model: Any, way: Callable[[Params, Params], None], steps: int = 2) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            way(list(model.target.parameters()), list(model.online.parameters()))


def follow_in_each_way(stage: int) -> None:
    for way in WAYS:
        plain, sharded = Pair(), zerocore.shard(Pair(), stage=stage)
        follow(plain, way)
        follow(sharded, way)
        found = zerocore.full_state_dict(sharded, rank0_only=False)
        torch.testing.assert_close(found, plain.state_dict(), msg=lambda t, w=way: f"{w}: {t}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_net_follows_another_one(stage: int, world_size: int) -> None:
    run_ranks(follow_in_each_way, world_size, stage)


def load_between(stages: tuple[int, int]) -> None:
    """Of two models, too, of any stages."""
    one, other = (zerocore.shard(Pair(seed), stage=s) for seed, s in enumerate(stages))
    layers = dict(zip(one.target.state_dict(), one.online.state_dict().values(), strict=True))
    one.target.load_state_dict(layers)
    expected = list(Pair(0).online.parameters())
    for param, right in zip(one.target.parameters(), expected, strict=True):
        torch.testing.assert_close(full_of(param), right.detach())
    with torch.no_grad():
        for param, source in zip(other.target.parameters(), one.online.parameters(), strict=True):
            param.copy_(source)
    for param, right in zip(other.target.parameters(), expected, strict=True):
        torch.testing.assert_close(full_of(param), right.detach())


@pytest.mark.parametrize("stages", [(3, 3), (3, 0), (0, 3), (1, 2)])
def test_values_go_from_net_to_net(stages: tuple[int, int]) -> None:
    run_ranks(load_between, 3, stages)


class Flow(nn.Module):
    """Densities by a method of its own, which no call of the module goes around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loc = nn.Parameter(torch.randn(1, 2))
        self.log_scale = nn.Parameter(torch.randn(1, 2))
        self.mix = nn.Parameter(torch.randn(2, 2))

    def forward(self, z: Tensor) -> Tensor:
        return self.log_prob(z)

    def log_prob(self, x: Tensor) -> Tensor:
        z = (x @ torch.tril(self.mix) - self.loc) / torch.exp(self.log_scale)
        volume = torch.sum(self.log_scale, dim=1) + (self.mix * 2).square().sum(1).log().sum()
        return -0.5 * (z * z + torch.exp(self.log_scale)[0] * self.loc.abs()).sum(1) - volume

    def sample(self, noise: Tensor) -> Tensor:
        return self.loc + noise * torch.exp(self.log_scale).view(-1)


def evaluate_a_method(stage: int) -> None:
    plain, sharded = Flow(), zerocore.shard(Flow(), stage=stage)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    for flow in (plain, sharded):
        flow.log_prob(x).sum().backward()
        torch.optim.SGD(flow.parameters(), lr=0.1).step()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            for name in ("log_prob", "sample"):
                torch.testing.assert_close(getattr(sharded, name)(x), getattr(plain, name)(x))
    with torch.no_grad():
        made: Any = torch.exp(sharded.mix)
    made[0].zero_()
    assert full_of(made)[0].tolist() == [0, 0] and made[1].min() > 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_method_without_gradients(stage: int, world_size: int) -> None:
    run_ranks(evaluate_a_method, world_size, stage)


def evaluate_alone() -> None:
    """At stage 0 nothing is sent, so rank 1 may evaluate by itself."""
    plain, sharded = Flow(), zerocore.shard(Flow(), stage=0)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    if dist.get_rank() == 1:
        with zerocore.reporting.record_events(sharded) as events, torch.no_grad():
            torch.testing.assert_close(sharded.log_prob(x), plain.log_prob(x))
        assert not events
    sharded(x).sum().backward()


def test_at_stage_0_one_rank_may_evaluate() -> None:
    run_ranks(evaluate_alone, 2)
