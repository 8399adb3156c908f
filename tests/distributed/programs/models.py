"""The tiny models that programs share, and the plainest loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.distributed.programs.run import Run

SIZE = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class SometimesTwo(nn.Module):
    """Two layers, of which the caller may leave out the second; both under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = Block(), Block()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.always(x)
        return checkpoint(self.sometimes, x, use_reentrant=False) if both else x


class Net(nn.Module):
    """Layers before, blocks, and layers after; from (batch, 8) to (batch, 8)."""

    def __init__(self, depth: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Words(nn.Module):
    """A tiny language model; its head may be the embedding."""

    def __init__(self, vocabulary: int = 11, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(SIZE, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(output: Tensor) -> Tensor:
    """The loss of most programs."""
    return output.square().mean()


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    """Plain gradient descent: its steps are the gradients."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(parameters: Any, **options: Any) -> Optimizer:
    """AdamW with an eps that does not turn rounding into steps."""
    return torch.optim.AdamW(parameters, **{"lr": 3e-3, "eps": 1e-5, **options})


def update(run: Run, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    """Backward, average, step; the loss is recorded."""
    loss.backward()
    run.average(model)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss)


def train(
    run: Run,
    model: Any,
    optimizer: Optimizer | None = None,
    loss: Callable[[Tensor], Tensor] = mean_square,
    steps: int = 3,
) -> None:
    """The plainest loop."""
    optimizer = optimizer or sgd(model)
    for x in run.batches(steps):
        update(run, model, optimizer, loss(model(x)))


def train_words(run: Run, model: Any, steps: int = 3, vocabulary: int = 11) -> None:
    """The plainest loop of a language model."""
    optimizer = sgd(model)
    for step in range(steps):
        tokens = run.tokens(vocabulary, 2, 6, key=step)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        update(run, model, optimizer, loss)
