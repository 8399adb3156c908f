"""A model of many kinds of matrices, and what one process makes of it with torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.values import full_of
from zerocore.matrices import ownership

SPLIT = {"*.qkv": 3}
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.05}


class Block(nn.Module):
    """Tall, wide, square and transposed matrices, a stack, a fused one, vectors, a tiny one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(48, 16))
        self.square = nn.Parameter(torch.randn(16, 16))
        self.tall = nn.Parameter(torch.randn(40, 16))
        self.wide = nn.Parameter(torch.randn(16, 64))
        self.turned = nn.Parameter(torch.randn(24, 16).T)
        self.experts = nn.Parameter(torch.randn(3, 16, 32))
        self.tiny = nn.Parameter(torch.randn(2, 1))  # empty shards on most ranks
        self.bias = nn.Parameter(torch.randn(16))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x @ self.qkv.mT * 0.1).chunk(3, -1)
        x = x + (query @ key.mT).tanh() @ value
        x = x + (x @ self.square).tanh()
        x = x + (x @ self.tall.mT).relu() @ (self.wide[:, :40].mT) * 0.1
        x = x + (x @ self.turned.mT.mT).tanh() @ self.turned.mT * 0.1
        for expert in self.experts:
            x = x + (x @ expert).tanh() @ expert.mT * 0.1
        return x * self.scale + self.bias * self.tiny.sum()


class Model(nn.Module):
    """Two blocks, and an embedding that AdamW trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x @ self.embed.weight.mT).float().logsumexp(-1).mean() + self.frozen.sum() * 0


def in_small_rounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `function` with matrices sent in several rounds; these are small and would go in one."""

    @wraps(function)
    def run(*args: Any) -> Any:
        before, ownership._MIN_ROUND_NBYTES = ownership._MIN_ROUND_NBYTES, 512
        try:
            return function(*args)
        finally:  # the process runs other tests
            ownership._MIN_ROUND_NBYTES = before

    return run


def seeded_model() -> Model:
    torch.manual_seed(0)
    return Model()


def gradient(name: str, like: Tensor, step: int) -> Tensor | None:
    """The averaged gradient of a step; one parameter has none in one step, another never."""
    if (name.endswith("0.tall") and step == 1) or name.endswith("1.square"):
        return None
    seed = sum(map(ord, name)) * 100 + step
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    # In the parameter's order of memory, as autograd makes it.
    return torch.empty_strided(like.shape, like.stride()).copy_(values)


def set_gradients(model: nn.Module, step: int) -> None:
    """The same full gradients on every rank, in a sharded model and in a plain one."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.grad = gradient(name, param, step)


def is_for_muon(name: str, param: Tensor) -> bool:
    return param.dim() >= 2 and "embed" not in name and not name.endswith("experts.bias")


def pieces(name: str, param: Tensor) -> Iterator[Tensor]:
    """The matrices in a parameter, views."""
    if param.dim() == 3:
        yield from param
    elif name.endswith("qkv"):
        yield from param.chunk(3)
    else:
        yield param


class OneProcess:
    """torch.optim.Muon on every matrix by itself, AdamW on the rest; ``model`` is not sharded."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = seeded_model() if model is None else model
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._cut = [
            (name, p, [nn.Parameter(piece.detach().clone()) for piece in pieces(name, p)])
            for name, p in named
            if is_for_muon(name, p)
        ]
        alone = [piece for _, _, found in self._cut for piece in found]
        rest = [p for name, p in named if not is_for_muon(name, p)]
        self.optimizers = [
            torch.optim.Muon(alone, **options),
            torch.optim.AdamW(rest, fused=True, **ADAMW),
        ]

    def step(self) -> None:
        """By the gradients that the model's parameters have."""
        for name, param, found in self._cut:
            for index, piece in enumerate(found):
                grad = param.grad
                piece.grad = None if grad is None else list(pieces(name, grad))[index].clone()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, param, found in self._cut:
                for own, trained in zip(pieces(name, param), found, strict=True):
                    own.copy_(trained)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def train_by_torch(steps: int, **options: Any) -> dict[str, Tensor]:
    """The parameters after some steps in one process."""
    alone = OneProcess(**options)
    for step in range(steps):
        set_gradients(alone.model, step)
        alone.step()
    return alone.parameters()


def train_sharded(
    make: Callable[[nn.Module], torch.optim.Optimizer], steps: int, **options: Any
) -> tuple[nn.Module, Any]:
    """The same steps on shards."""
    model = zerocore.shard(seeded_model(), units=[Block], **options)
    optimizer = make(model)
    take_steps(model, optimizer, range(steps))
    return model, optimizer


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def make_muon(model: nn.Module, **options: Any) -> zerocore.matrices.Muon:
    return zerocore.matrices.Muon(
        model.named_parameters(), adamw=ADAMW, adamw_names=["embed*"], split=SPLIT, **options
    )


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """On every rank."""
    return {name: full_of(p.detach()) for name, p in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bitwise, with the name of what differs."""
    for name, value in expected.items():
        what = partial("{}: {}".format, name)
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=what)
