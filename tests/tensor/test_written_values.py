"""Values that a program writes to parameters: what ranks compare, and what else is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from zerocore.model.state import find_state

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


def between(kind: str) -> Callable[[Any], Any]:
    """A write between steps that is another one on each rank."""
    number = float(dist.get_rank())

    @torch.no_grad()
    def write(param: Any) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        full = torch.randn(param.shape, generator=generator)
        if kind == "number":
            param.add_(number)
        elif kind == "data":
            param.data.mul_(1 + number)
        elif kind == "copy_":
            param.copy_(full)
        elif kind == "detach":
            param.detach().copy_(full)
        elif kind == "data =":
            param.data = full
        elif kind == "foreach":
            torch._foreach_add_([param], [full])
        elif kind == "scalar tensor":
            param.mul_(torch.tensor(1 + number))
        else:
            param[:] = full

    return write


BETWEEN = ("number", "data", "copy_", "detach", "data =", "foreach", "scalar tensor", "items")


def differ_between_steps(stage: int, shape: tuple[int, int] | None) -> None:
    options = {}
    if shape is not None:
        options["group"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    net, wrapped = build(stage, **options)
    net.norm.begins = False
    for kind in BETWEEN:
        between(kind)(net.first.weight)
        print(kind, flush=True)  # shown if the rank fails
        with pytest.raises(ValueError, match=r"'first.weight' was changed.*between steps"):
            wrapped(batch(0)).square().mean().backward()
        zerocore.reset(net)
        between(kind)(net.last.bias)
        with torch.no_grad():
            try:
                wrapped(batch(0))
            except ValueError as error:
                assert "'last.bias' was changed" in str(error)
            else:  # a rank may own all of a vector: a full one says nothing
                assert kind in ("copy_", "detach", "data =", "foreach", "items"), kind
        zerocore.reset(net)
    net.first.weight.data.fill_(0.1)
    train(net, wrapped)


@pytest.mark.parametrize(
    ("stage", "shape"), [(1, None), (2, None), (3, None), (2, (2, 2)), (3, (2, 2))]
)
def test_writes_between_steps_that_differ(stage: int, shape: Any) -> None:
    run_ranks(differ_between_steps, 3 if shape is None else 4, stage, shape)


def parts_at_stage_0() -> None:
    """As under DDP, each rank keeps what it writes."""
    results = []
    for system in (0, "ddp"):
        net, wrapped = build(system)
        for kind in BETWEEN:
            between(kind)(net.first.weight)
        net.norm.begins = False
        results.append(wrapped(batch(0)).detach())
    torch.testing.assert_close(*results)


def test_writes_between_steps_at_stage_0_are_each_rank_s() -> None:
    run_ranks(parts_at_stage_0, 2)


def alike_between_steps(stage: int) -> None:
    """Local elements, shards, noise by rank and an optimizer's own steps differ by right; and no
    write costs a message."""
    net, wrapped = build(stage)
    net.norm.begins = False
    optimizer = Decayed(net.parameters())
    counts = []
    for step in range(6):
        wrapped(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(engine_of(net).agreed["num_messages"])
        if step < 3:
            continue
        with torch.no_grad():
            for param in net.parameters():
                param.add_(torch.rand_like(param) * (1 + dist.get_rank()))
                param.mul_(0.9).clamp_(-1, 1)
                param.local().mul_(1 + dist.get_rank())
                param.data.local().data.mul_(1 + dist.get_rank())
                param.data = param.detach() * 0.5
            nn.init.normal_(net.last.weight)
            net.first.weight.copy_(net.first.weight.local() + dist.get_rank())
    assert counts[-1] - counts[-2] == counts[2] - counts[1]
    full = full_state(net)["first.weight"]
    wrapped(batch(0))
    torch.testing.assert_close(full_state(net)["first.weight"], full)


class Decayed(torch.optim.Optimizer):
    """Steps whose numbers are this rank's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - 0.01 * dist.get_rank())


def engine_of(net: nn.Module) -> Any:
    state = find_state(net)
    assert state is not None
    return state.engine


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_between_steps_that_differ_by_right(stage: int) -> None:
    run_ranks(alike_between_steps, 3, stage)


def full_by_rank(stage: int) -> None:
    """Full parameters of `unsharded`, and the data of DTensors."""
    net, wrapped = build(stage)
    net.norm.begins = False
    if stage != "fsdp":
        with zerocore.unsharded(net, write_back=True), torch.no_grad():
            net.last.bias.add_(dist.get_rank())
    else:
        wrapped(batch(0)).sum().backward()
        net.last.bias.data = torch.ones(1) * dist.get_rank()
    with pytest.raises(ValueError, match=r"'last.bias' was changed in place"):
        wrapped(batch(0)).sum().backward()
    net.zero_grad()
    train(net, wrapped)


@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_full_values_that_differ(system: Any) -> None:
    run_ranks(full_by_rank, 2, system)


def views_outside(stage: int) -> None:
    """Views of a parameter outside of a call are copies that write to it."""
    net, _ = build(stage)
    weight = net.first.weight
    plain = nn.Parameter(full_state(net)["first.weight"].clone())
    views: list[Callable[[Any], Any]] = [
        lambda w: w[0].data.fill_(3.0),
        lambda w: w.view(-1).data.mul_(2.0),
        lambda w: w[:, 1].detach().zero_(),
        lambda w: w.T.data.add_(1.0),
        lambda w: w.view(-1).detach().data.sub_(0.5),
        lambda w: w.chunk(2)[0].data.mul_(3.0),
    ]
    for write in views:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                write(weight)
                write(plain)
            torch.testing.assert_close(full_state(net)["first.weight"], plain.detach())
    loss = (weight.view(-1) * 2).sum() + weight[0].sum() + weight.T.mean()
    (grad,) = torch.autograd.grad(loss, [weight])
    expected = torch.full((WIDTH, WIDTH), 2 + 1 / WIDTH**2)
    expected[0] += 1
    torch.testing.assert_close(grad, expected)


def test_views_outside_of_a_call(stage: int) -> None:
    run_ranks(views_outside, 2, stage)


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
            pytest.raises(RuntimeError, match=r"'first.weight' was changed inside unsharded"),
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
