"""Parameters that a forward changes in place, by ranks that come to it at different times."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.by_night import by_day, by_night
from tests.distributed.harness import run_ranks

WIDTH, STEPS = 8, 5


class Code(nn.Module):
    """Added to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.code)

    @torch.no_grad()
    def move(self) -> None:
        self.code.mul_(0.9).add_(0.05)


class Moving(nn.Module):
    """Moves its code once in each pass; a rank's turn says when, and what is called around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.code = Code()

    def forward(self, x: Tensor, turn: int) -> Tensor:
        x = self.code(self.first(x))
        for number in range(3):
            if number == turn % 3:
                self.code.move()
            if (number + turn) % 2:
                x = self.code(self.second(x))
            if (number + turn) % 3 == 0:
                x = self.second(self.code(x))
        return self.last(self.code(x))


class Late(Moving):
    """Some ranks leave with the code moved; the others still call it, in an order that all know."""

    def forward(self, x: Tensor, turn: int) -> Tensor:
        x = self.code(self.first(x))
        if turn % 2:
            self.code.move()
            return x
        x = self.last(x)
        for _ in range(3):
            x = self.code(self.second(x))
        self.code.move()
        return x


def train(system: str, kind: type[Moving], stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = kind()
    rank = dist.get_rank()
    if system == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped = zerocore.shard(
            model,
            stage=stage,
            units=[Code, nn.Linear],
            communication=zerocore.Communication(prefetch=0),
        )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = wrapped(x, rank + step).square().mean()
        with torch.no_grad():
            losses.append(wrapped(x + 1, 2 * rank + step).mean())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = (
        zerocore.full_state_dict(model, rank0_only=False) if system != "ddp" else model.state_dict()
    )
    return dict(state) | {"losses": torch.stack(losses)}


def compare(kind: type[Moving], stage: int) -> None:
    torch.testing.assert_close(train("zerocore", kind, stage), train("ddp", kind, stage))


KINDS = [(kind, stage) for kind in (Moving, Late) for stage in (3, 0, 1, 2)]


@pytest.mark.parametrize("world_size", [2, 3, 4, *by_night(8, 16)])
@pytest.mark.parametrize(("kind", "stage"), by_day(KINDS, [(Moving, 3), (Late, 3)]))
def test_each_rank_computes_with_its_own_writes(
    kind: type[Moving], stage: int, world_size: int
) -> None:
    run_ranks(compare, world_size, kind, stage)
