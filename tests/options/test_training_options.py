"""Options of training loops: groups by shape, buffers of rank 0, sums of gradients, an average."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


class Net(nn.Module):
    """Convolution, batch norm and a head; tied to nothing, no two alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(24, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1)) * self.scale


def sample(rank: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 2, 8, generator=draw) + rank


def groups_by_shape() -> None:
    for stage in range(4):
        plain = Net()
        names = {id(param): name for name, param in plain.named_parameters()}
        before = [[names[id(p)] for p in g["params"]] for g in zerocore.param_groups(plain, 0.1)]
        plain.scale.requires_grad_(False)
        model = zerocore.shard(plain, stage=stage)
        groups = zerocore.param_groups(model, 0.1)
        names = {id(param): name for name, param in model.named_parameters()}
        after = [[names[id(p)] for p in group["params"]] for group in groups]
        assert before == [
            ["conv.weight", "head.weight"],
            ["scale", "conv.bias", "norm.weight", "norm.bias", "head.bias"],
        ]
        assert after == [before[0], before[1][1:]]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        torch.optim.AdamW(groups)
    assert len(zerocore.param_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    with pytest.raises(ValueError, match="Linear has no parameters that require grad"):
        zerocore.param_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


def train(model: nn.Module, no_sync: Any) -> list[float]:
    """Three steps of two micro-batches, an evaluation behind each."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    figures = []
    for step in range(3):
        for index in range(2):
            with no_sync(model) if index == 0 else nullcontext():
                loss = model(sample(rank, 2 * step + index)).square().mean()
                loss.backward()
            figures.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            figures.append(model(sample(rank, 99)).square().mean().item())
        model.train()
    return figures


def sync_buffers() -> None:
    ddp = DistributedDataParallel(Net())
    expected = train(ddp, DistributedDataParallel.no_sync)
    for stage in range(4):
        model = zerocore.shard(Net(), stage=stage)
        torch.testing.assert_close(train(model, zerocore.no_sync), expected)
        torch.testing.assert_close(dict(model.named_buffers()), dict(ddp.module.named_buffers()))
    apart = zerocore.shard(Net(), stage=3, communication=zerocore.Communication(sync_buffers=False))
    train(apart, zerocore.no_sync)
    means = [torch.empty(4) for _ in range(2)]
    dist.all_gather(means, apart.norm.running_mean)
    assert not torch.allclose(*means)  # without the option ranks differ


class Centred(Net):
    """With a constant table, statistics of a batch norm in evaluation, and a buffer that each
    forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4).eval()
        self.register_buffer("table", torch.arange(1.0, 9.0))
        self.register_buffer("centre", torch.zeros(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * x.mean((0, 2))[:, None]
        x = self.conv((x - self.centre) * self.table[: x.shape[2]] * self.scale * self.centre)
        return self.head(self.frozen(self.norm(x)).flatten(1))


def call_twice(model: nn.Module, rank: int, step: int) -> Tensor:
    pair = [model(sample(rank, 2 * step + index)) for index in range(2)]
    return (pair[0] - pair[1]).square().mean() + pair[0].mean()


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    return [full_of(grad) if hasattr(grad, "full_tensor") else grad for grad in grads]


def two_forwards_for_a_loss() -> None:
    """The broadcast before the second one writes nothing that the first one has saved."""
    rank = dist.get_rank()
    for stage in (0, 3):
        ddp = DistributedDataParallel(Net())
        model = zerocore.shard(
            Net(), stage=stage, communication=zerocore.Communication(sync_buffers=True)
        )
        for step in range(3):
            for net in (ddp, model):
                net.zero_grad()
                call_twice(net, rank, step).backward()
            torch.testing.assert_close(gradients(model), gradients(ddp.module))
            found, right = (dict(net.named_buffers()) for net in (model, ddp.module))
            torch.testing.assert_close(found, right)


def two_forwards_with_other_buffers() -> None:
    for stage in (0, 3):
        nets, model = (
            [Centred(), Centred()],
            zerocore.shard(
                Centred(), stage=stage, communication=zerocore.Communication(sync_buffers=True)
            ),
        )
        for step in range(3):
            losses: list[Any] = [0.0, 0.0]
            outputs: list[list[Tensor]] = [[], []]
            for index in range(2):
                nets[1].centre = nets[0].centre
                for rank, net in enumerate(nets):
                    outputs[rank].append(net(sample(rank, 2 * step + index)))
            for rank, (first, second) in enumerate(outputs):
                nets[rank].zero_grad()
                losses[rank] = (first - second).square().mean() + first.mean()
            model.zero_grad()
            loss = call_twice(model, dist.get_rank(), step)
            torch.testing.assert_close(loss, losses[dist.get_rank()])
            loss.backward()
            for each in losses:
                each.backward()
            pairs = zip(*map(gradients, nets), strict=True)
            torch.testing.assert_close(gradients(model), [sum(pair) / 2 for pair in pairs])
        torch.testing.assert_close(model.centre, nets[dist.get_rank()].centre)


def divide_gradients() -> None:
    for stage in range(4):
        for factor in (None, 1.0, 5.0):
            model = zerocore.shard(
                Net(),
                stage=stage,
                communication=zerocore.Communication(gradient_divide_factor=factor),
            )
            total = Net()
            model(sample(dist.get_rank(), 0)).square().mean().backward()
            for rank in range(2):
                total(sample(rank, 0)).square().mean().backward()
            for param, whole in zip(model.parameters(), total.parameters(), strict=True):
                expected = whole.grad / (factor or 2)
                torch.testing.assert_close(full_of(param.grad), expected)
    for factor in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="gradient_divide_factor must be positive"):
            zerocore.shard(
                Net(), communication=zerocore.Communication(gradient_divide_factor=factor)
            )


def test_groups_by_shape() -> None:
    groups_by_shape()  # on one rank
    run_ranks(groups_by_shape, 2)


def test_buffers_follow_rank_0_as_under_ddp() -> None:
    run_ranks(sync_buffers, 2)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="DistributedDataParallel raises, too")
def test_two_forwards_for_a_loss_go_with_a_broadcast_of_buffers() -> None:
    run_ranks(two_forwards_for_a_loss, 2)


def test_a_broadcast_leaves_what_a_forward_has_saved() -> None:
    run_ranks(two_forwards_with_other_buffers, 2)


def test_gradients_are_divided_as_asked() -> None:
    run_ranks(divide_gradients, 2)
    model = zerocore.shard(
        Net(), communication=zerocore.Communication(gradient_divide_factor=5.0)
    )  # one rank
    reference = Net()
    for net in (model, reference):
        net(sample(0, 0)).square().mean().backward()
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_of(param.grad), whole.grad / 5.0)
