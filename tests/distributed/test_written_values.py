"""Values that a program writes to parameters: what ranks compare, and what else is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

WIDTH, STEPS = 6, 3
SYSTEMS = (0, 1, 2, 3, "fsdp")


class ActNorm(nn.Module):
    """Takes scale and bias from its first batch, where `begins` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.begins, self.averages = True, True

    def init(self, x: Tensor) -> None:
        moments = torch.stack([x.detach().mean(0), x.detach().square().mean(0)])
        if self.averages:
            dist.all_reduce(moments)
            moments /= dist.get_world_size()
        std = (moments[1] - moments[0].square()).sqrt() + 0.1
        self.scale.data.copy_(1 / std)
        self.bias.data[:] = -moments[0] / std
        self.begins = False

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            self.init(x)
        return x * self.scale + self.bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(WIDTH, WIDTH),
            ActNorm(),
            nn.Linear(WIDTH, 1),
        )
        self.after: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        self.after()
        return self.last(x)


def build(system: Any, **options: Any) -> tuple[Net, nn.Module]:
    torch.manual_seed(0)
    net = Net()
    wrapped: nn.Module = net
    if system == "ddp":
        wrapped = DistributedDataParallel(net)
    elif system == "fsdp":
        for module in (net.first, net.norm, net.last, net):
            zerocore.fsdp.fully_shard(module, **options)
    else:
        zerocore.shard(net, stage=system, units=[nn.Linear, ActNorm], **options)
    return net, wrapped


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator)


def train(net: Net, wrapped: nn.Module, after_step: Callable[[], None] = lambda: None) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = wrapped(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        after_step()
    return torch.stack(losses), full_state(net)


def full_state(net: Net) -> dict[str, Tensor]:
    if zerocore.is_sharded(net.first.weight):
        return dict(zerocore.full_state_dict(net, rank0_only=False))
    state = get_model_state_dict(net)
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def first_batch(system: Any) -> None:
    torch.testing.assert_close(train(*build(system)), train(*build("ddp")))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_first_batch_may_set_parameters(system: Any) -> None:
    run_ranks(first_batch, 2, system)


def differ(system: Any, place: str) -> None:
    """Each rank writes what it makes of its own batch, or one rank alone writes."""
    net, wrapped = build(system)
    before = full_state(net)
    net.norm.averages, net.norm.begins = False, place == "forward"

    def write(*_: Any) -> None:
        with torch.no_grad():
            net.norm.bias.mul_(1.0 + dist.get_rank()).add_(dist.get_rank())

    if place == "backward":
        handle = net.norm.register_full_backward_pre_hook(write)  # its values are here
    elif place == "one rank" and dist.get_rank() == 1:
        handle = net.norm.register_forward_hook(write)
    name = r"'norm\.(scale|bias)' was changed in place.*differ between the ranks"
    with pytest.raises(ValueError, match=name):
        for step in range(2):
            wrapped(batch(step)).square().mean().backward()
    if place == "backward" or (place == "one rank" and dist.get_rank() == 1):
        handle.remove()
    net.zero_grad()
    if system in (3, "fsdp") and place != "backward":
        torch.testing.assert_close(full_state(net), before)
    net.norm.averages, net.norm.begins = True, True
    expected = build("ddp")
    full = full_state(net)
    expected[0].load_state_dict(full)
    torch.testing.assert_close(train(net, wrapped), train(*expected))


@pytest.mark.parametrize("place", ["forward", "backward", "one rank"])
@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_writes_that_differ_are_an_error_on_all_ranks(system: Any, place: str) -> None:
    run_ranks(differ, 2 if place == "forward" else 3, system, place)


def narrow(stage: int, ddp: bool) -> None:
    """Layers compute in bfloat16: what a forward writes is in the main weights, too."""
    net, wrapped = build(stage, mixed_precision=zerocore.MixedPrecision(torch.bfloat16))
    net.norm.begins = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def half() -> None:
        net.first.weight.data.mul_(0.5)

    net.after = half
    full = full_state(net)["first.weight"]
    wrapped(batch(0)).square().mean()
    torch.testing.assert_close(full_state(net)["first.weight"], full / 2, rtol=1e-2, atol=1e-3)
    optimizer.step()
    wrapped(batch(0)).square().mean().backward()
    torch.testing.assert_close(full_state(net)["first.weight"], full / 4, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_to_narrow_weights_is_in_the_main_weights(stage: int) -> None:
    run_ranks(narrow, 2, stage, False)


def assigned(cut: int) -> None:
    """The averages of BYOL: `p.data = ...` between steps, from before the first forward on."""
    results = []
    for system in ("ddp", "fsdp"):
        options = {} if system == "ddp" else {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}
        net, wrapped = build(system, **(options if cut else {}))
        start = {name: param.detach().clone() for name, param in net.named_parameters()}

        def average(net: Net = net, start: Any = start) -> None:
            for name, param in net.named_parameters():
                param.data = 0.5 * param.data + 0.5 * start[name]

        for param in net.parameters():
            param.data = param.data * 1.5
        if system == "fsdp":
            net.last.bias.data = 3 * torch.ones(1)  # a full one
        else:
            net.last.bias.data.fill_(3.0)
        results.append(train(net, wrapped, average))
    torch.testing.assert_close(results[1], results[0])
    for wrong in (torch.ones(WIDTH + 1), torch.ones(WIDTH).double()):
        with pytest.raises(ValueError, match=r"data of parameter 'first.bias' takes a tensor of"):
            net.first.bias.data = wrong


@pytest.mark.parametrize("cut", [0, 1])
def test_data_of_a_dtensor_takes_values(cut: int) -> None:
    run_ranks(assigned, 2 if cut else 3, cut)


def held_in_full(stage: int) -> None:
    """Inside of `unsharded` writes through `data` are kept with `write_back`, else an error."""
    net, _ = build(stage)
    for write in (lambda p: p.data.mul_(2), lambda p: setattr(p, "data", p.data * 2)):
        before = full_state(net)["first.weight"]
        with (
            pytest.raises(RuntimeError, match=r"'first.weight' was changed inside of unsharded"),
            zerocore.unsharded(net),
        ):
            write(net.first.weight)
        with zerocore.unsharded(net):
            if stage == 3:
                torch.testing.assert_close(net.first.weight.detach(), before)
        with zerocore.unsharded(net, write_back=True):
            write(net.first.weight)
        if stage == 3:
            torch.testing.assert_close(full_state(net)["first.weight"], before * 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_inside_of_unsharded(stage: int) -> None:
    run_ranks(held_in_full, 2, stage)
