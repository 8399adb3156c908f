"""Random models in which two parameters, or a parameter and a buffer, lie in one storage."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
STEPS = 2
# The second tensor, and its fate: one parameter with the first, memory of its own, or an error.
RELATIONS = {
    "data": "tied",
    "alias": "tied",
    "parameter": "tied",
    "transposed": "refused",
    "rows": "refused",
    "frozen": "refused",
    "bits": "refused",
    "halves": "apart",
    "columns": "apart",
    "buffer": "refused",
    "buffer_of_rows": "refused",
    "transposed_buffer": "refused",
    "buffer_behind": "apart",
    "buffers": "apart",
    "clone": "apart",
}


class Holder(nn.Module):
    """A layer with a tensor of its own, which may be a parameter or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight: Any = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return (
            torch.tanh(self.layer(x))
            + x @ F.pad(weight, (0, WIDTH - weight.shape[1]))[:1].mean(0).diag()
        )


class Net(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Holder() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True)
class Case:
    """A relation of the tensors of two parts, and how the model is sharded."""

    relation: str
    parts: tuple[int, int]
    number: int
    stage: int | str
    joins: bool  # fully_shard is called with both parts

    @property
    def names(self) -> tuple[str, str]:
        return tuple(f"parts.{part}.weight" for part in self.parts)  # type: ignore[return-value]

    @property
    def outcome(self) -> str:
        wanted = RELATIONS[self.relation]
        if self.stage != "fsdp":
            return wanted
        if self.relation in ("transposed", "columns"):
            return "not contiguous"  # as FSDP2
        return "in two groups" if wanted == "tied" and not self.joins else wanted


def case_of(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"views {seed}")
    number = rng.randint(2, 4)
    first, second = rng.sample(range(number), 2)
    stage = rng.choice((0, 1, 2, 3, "fsdp"))
    relation = rng.choice([*RELATIONS])
    return Case(relation, (first, second), number, stage, rng.random() < 0.5)


def build(case: Case, seed: int) -> Net:
    """The model of a case."""
    torch.manual_seed(seed)
    net = Net(case.number)
    first, second = (net.parts[part] for part in case.parts)
    weight = first.weight
    memory = torch.randn(2 * WIDTH, WIDTH)
    made: dict[str, Any] = {
        "alias": lambda: nn.Parameter(weight.detach()),
        "parameter": lambda: weight,
        "transposed": lambda: nn.Parameter(weight.detach().t()),
        "rows": lambda: nn.Parameter(weight.detach()[1:]),
        "frozen": lambda: nn.Parameter(weight.detach(), requires_grad=False),
        "bits": lambda: nn.Parameter(weight.detach().view(torch.int32), requires_grad=False),
        "clone": lambda: nn.Parameter(weight.detach().clone()),
    }
    if case.relation == "data":
        second.weight.data = weight.data
    elif case.relation == "halves":
        first.weight, second.weight = (nn.Parameter(half) for half in memory.chunk(2))
    elif case.relation == "columns":
        first.weight, second.weight = (nn.Parameter(half) for half in memory.chunk(2, dim=1))
    elif case.relation == "buffers":
        replace_by_buffers(first, second, memory[:WIDTH])
    elif case.relation == "buffer_behind":
        first.weight = nn.Parameter(memory[:WIDTH])
        as_buffer(second, memory[WIDTH:])
    elif "buffer" in case.relation:
        data = weight.data
        as_buffer(second, {"buffer": data, "buffer_of_rows": data[2:]}.get(case.relation, data.t()))
    else:
        second.weight = made[case.relation]()
    return net


def as_buffer(part: nn.Module, value: Tensor) -> None:
    del part.weight
    part.register_buffer("weight", value)


def replace_by_buffers(first: nn.Module, second: nn.Module, value: Tensor) -> None:
    """Buffers may share memory with each other: nobody shards them."""
    as_buffer(first, value)
    as_buffer(second, value)


def losses_of(net: nn.Module, ranks: range) -> list[Tensor]:
    """The loss of each rank."""
    losses = []
    for rank in ranks:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
        losses.append(net(x).square().mean())
    return losses


def train(net: nn.Module, ranks: range) -> list[float]:
    """Plain descent, in which tied parameters take two steps or one with the sum; returns the
    losses of the ranks."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    numbers = []
    for _ in range(STEPS):
        losses = losses_of(net, ranks)
        numbers += [loss.item() for loss in losses]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers
