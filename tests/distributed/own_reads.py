"""Random modules that read their own parameters in many ways, and what one process makes of them.

A part of the model is a sequence of reads; several give a gradient to no parameter, or keep one for
the backward where autograd does not see that it is a parameter's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.random_runs import Result

WIDTH = 4
STEPS = 2
READS = (
    "plain", "detached", "data", "view_without_grad", "saved", "saved_detached", "attribute",
    "packed", "checkpointed", "reentrant", "hook", "straight_through", "norm", "frozen", "inner",
    "inner_weight", "twice", "gained",
)  # fmt: skip


class Saves(torch.autograd.Function):
    """A product with a weight that it saves, which has a gradient if it asks for one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad if ctx.needs_input_grad[1] else None


class Keeps(torch.autograd.Function):
    """The same, with a weight that no argument is; without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.kept = owner.weight
        return x @ ctx.kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad @ ctx.kept.t(), None


class Reader(nn.Module):
    """Goes through its reads; each one's output is bounded."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.uses_all = rng.random() < 0.6  # at its end, so all gradients come first
        trains = self.uses_all or rng.random() < 0.3
        self.code = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=trains)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.reads = rng.choices(READS, k=rng.randint(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.reads:
            read: Callable[[Tensor], Tensor] = getattr(self, name)
            x = x + torch.tanh(read(x))
        if self.uses_all:
            x = torch.tanh(self.gained(self.inner(x)) + self.plain(x) + self.frozen(x))
        return x

    def plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def detached(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.gain.detach())

    def data(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.data) * self.gain.data

    def view_without_grad(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.weight.t()[:, 1:]
        return F.pad(x @ weight, (0, 1))

    def saved(self, x: Tensor) -> Tensor:
        return Saves.apply(x, self.weight)

    def saved_detached(self, x: Tensor) -> Tensor:
        return Saves.apply(x, self.weight.detach())

    def attribute(self, x: Tensor) -> Tensor:
        return Keeps.apply(x, self)

    def packed(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, 1), lambda kept: kept[0]):
            return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self.detached, x, use_reentrant=False)

    def reentrant(self, x: Tensor) -> Tensor:
        return checkpoint(self.detached, x, use_reentrant=True)

    def hook(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.code.detach())
        gain = self.gain.detach()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * gain)
        return y

    def straight_through(self, x: Tensor) -> Tensor:
        hard = (self.weight > 0).to(x.dtype)
        return x @ (hard + self.weight - self.weight.detach())

    def norm(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            direction = F.normalize(self.weight @ x.mean(0), dim=0)
        return F.linear(x, self.weight / torch.dot(direction, self.weight @ direction).exp())

    def frozen(self, x: Tensor) -> Tensor:
        return F.linear(x, self.code)

    def inner_weight(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight.detach())

    def twice(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)

    def gained(self, x: Tensor) -> Tensor:
        return x * self.gain + x * self.gain.detach().sum()


class Net(nn.Module):
    """Some readers, each of which may be called twice; the root reads weights of theirs, too."""

    def __init__(self, rng: random.Random, crosses: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Reader(rng) for _ in range(rng.randint(1, 4)))
        self.calls = rng.choices(range(len(self.parts)), k=rng.randint(1, 5))
        self.crosses = crosses and rng.random() < 0.5
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + x * self.scale.detach()
        for index in self.calls:
            x = self.parts[index](x)
            if self.crosses:
                x = x + torch.tanh(F.linear(x, self.parts[index - 1].weight.detach()))
        return x


def build(seed: int) -> tuple[Net, int | str, bool]:
    """A model, its stage (or "fsdp"), and whether two forwards have one backward."""
    rng = random.Random(f"reads {seed}")
    stage = rng.choice((0, 2, 3, 3, "fsdp"))
    torch.manual_seed(seed)
    return Net(rng, crosses=stage != "fsdp").double(), stage, rng.random() < 0.3


def loss_of(net: nn.Module, seed: int, step: int, rank: int, is_joint: bool) -> Tensor:
    """The loss of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    loss = torch.tanh(net(x)).square().mean()
    return loss + torch.tanh(net(x.flip(0) * 2)).mean() if is_joint else loss


def reference(seed: int, world_size: int) -> Result:
    """One process that does every rank's part."""
    net, _, is_joint = build(seed)
    optimizer = make_optimizer(net)
    result = Result([[] for _ in range(world_size)])
    for step in range(STEPS):
        for rank, numbers in enumerate(result.numbers):
            loss = loss_of(net, seed, step, rank, is_joint)
            numbers.append(loss.item())
            (loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    result.state = {name: value.detach() for name, value in net.state_dict().items()}
    return result


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Plain descent."""
    return torch.optim.SGD(net.parameters(), lr=0.05)
