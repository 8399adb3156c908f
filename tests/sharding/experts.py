"""A model with experts on different ranks, and the same one with all experts in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import zerocore
from zerocore.planning.prediction import planned_events

DIM, NUM_EXPERTS, NUM_TOKENS = 6, 4, 5


class _Gather(Function):
    """The tokens of all ranks of a group; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tokens) for _ in range(group.size())]
        dist.all_gather(parts, tokens.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _own_sum(grads[0], ctx.group), None


class _Sum(Function):
    """This rank's rows of the sum over the ranks; the reverse of a gather."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grads[0]) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None


def _own_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = parts.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()]


class Experts(nn.Module):
    """Some experts, each of which computes the tokens that are sent to it."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(end - first, DIM, DIM))
        self.bias = nn.Parameter(torch.empty(end - first, DIM))

    def forward(self, tokens: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        for index in range(len(weight)):
            sent = (choice == self.first + index).unsqueeze(1)
            out = out + sent * torch.tanh(tokens @ weight[index] + bias[index])
        return out


class MoE(nn.Module):
    """A router and experts; ``group``: the ranks over which the experts are spread."""

    def __init__(self, group: dist.ProcessGroup | None, bounds: list[int]) -> None:
        super().__init__()
        self.group = group
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        rank = 0 if group is None else group.rank()
        self.experts = Experts(bounds[rank], bounds[rank + 1])

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.router(tokens).softmax(-1)
        weight, choice = scores.max(-1, keepdim=True)
        if self.group is None:
            return tokens + weight * self.experts(tokens, choice.squeeze(1))
        everywhere = _Gather.apply(tokens, self.group)
        found = self.experts(everywhere, _gathered(choice, self.group).squeeze(1))
        return tokens + weight * _Sum.apply(found, self.group)


def _gathered(choice: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(choice) for _ in range(group.size())]
    dist.all_gather(parts, choice, group=group)
    return torch.cat(parts)


class Model(nn.Module):
    """Two blocks with experts between dense layers."""

    def __init__(self, group: dist.ProcessGroup | None, bounds: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(MoE(group, bounds) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.first(tokens)
        for block in self.blocks:
            tokens = block(tokens)
        return self.last(tokens)


def whole_model() -> Model:
    """All experts in one process; the same numbers on every rank."""
    torch.manual_seed(0)
    model = Model(None, [0, NUM_EXPERTS])
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def spread_model(group: dist.ProcessGroup, bounds: list[int]) -> Model:
    """The same model with this rank's experts: those from ``bounds[r]`` to ``bounds[r + 1]``."""
    whole, model = whole_model(), Model(group, bounds)
    own = slice(bounds[group.rank()], bounds[group.rank() + 1])
    with torch.no_grad():
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            param.copy_(full[own] if ".experts." in name else full)
    return model


def experts_as_dtensors(model: Model, mesh: DeviceMesh) -> None:
    """Each rank of a 1-D mesh has an equal part of them."""
    for block in model.blocks:
        experts: Any = block.experts
        for name, param in list(experts.named_parameters()):
            part = DTensor.from_local(param.detach(), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(part))


def tokens_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (NUM_TOKENS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(model: nn.Module, ranks: Sequence[int], number: int) -> Tensor:
    """Of the tokens of these ranks in a step."""
    data = [tokens_of(rank, number) for rank in ranks]
    tokens, targets = (torch.cat(each) for each in zip(*data, strict=True))
    return (model(tokens) - targets).square().mean()


def loss_of_ones(model: nn.Module, width: int, number: int) -> Tensor:
    """The same in each step."""
    return model(torch.ones(2, width)).sum()


def assert_follows_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    own_loss: Callable[[int], Tensor],
    since: int = 2,
) -> list[zerocore.reporting.Event]:
    """Of three steps those from ``since`` on are as planned; returns the events of the last.

    ``own_loss``: of this rank in a step.
    """
    for number in range(3):
        with zerocore.reporting.record_events(model) as events:
            own_loss(number).backward()
            optimizer.step()
        optimizer.zero_grad()
        if number >= since:
            found = [(event.op, event.unit, event.nbytes, event.pool_nbytes) for event in events]
            assert found == planned_events(model), number
    return events
