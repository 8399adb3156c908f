"""Trains one model under both of ``torch.distributed.fsdp`` and ``zerocore.fsdp``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerocore
import zerocore.fsdp as zerocore_fsdp

ENGINES: dict[str, Any] = {"torch": torch_fsdp, "zerocore": zerocore_fsdp}
NUM_STEPS = 4
ADAMW = partial(torch.optim.AdamW, foreach=True)  # DTensors one by one take longer


@dataclass
class Trained:
    """Losses of this rank and full values after the last step, by name."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]


class Block(nn.Module):
    """A block of nine parameters with sizes that three and four ranks do not divide evenly."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q * k) * v)
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between an embedding and a head, whose parameters are the root's."""

    def __init__(self, num_blocks: int = 3, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net() -> Net:
    """The same on every rank."""
    torch.manual_seed(0)
    return Net()


def tokens_of(step: int, micro: int = 0) -> Tensor:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dist.get_rank())
    return torch.randint(0, 7, (4, 5), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, in float32."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def shard_blocks(fsdp: Any, model: Any, **options: Any) -> Any:
    """Bottom-up, as users do."""
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Values of all ranks, by name."""
    params = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        params[name] = param.full_tensor().detach().clone()
    return params


def train(
    model: nn.Module,
    step: Callable[[nn.Module, int], float] | None = None,
    make_optimizer: Callable[..., Any] = ADAMW,
) -> Trained:
    """Some steps with gradients clipped."""
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for index in range(NUM_STEPS):
        if step is None:
            loss = loss_of(model, tokens_of(index))
            loss.backward()
            losses.append(loss.item())
        else:
            losses.append(step(model, index))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, full_params(model))


def train_both(
    run: Callable[[Any, nn.Module], Trained], make: Callable[[], nn.Module] = make_net
) -> dict[str, Trained]:
    """``run(module of functions, model)`` under each engine, from the same weights."""
    model = make()
    return {name: run(fsdp, copy.deepcopy(model)) for name, fsdp in ENGINES.items()}


def check_same(trained: dict[str, Trained], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Both learned, and the same."""
    theirs, ours = trained["torch"], trained["zerocore"]
    assert theirs.losses[0] != theirs.losses[-1], "the reference does not learn"
    for found, expected in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=atol
        )
    assert ours.params.keys() == theirs.params.keys()
    for name, value in theirs.params.items():
        torch.testing.assert_close(
            ours.params[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def check_plan(model: nn.Module, *parts: str) -> None:
    """A forward and backward move the plan's bytes; these parts of the memory are as planned."""
    with zerocore.reporting.record_events(model) as events:
        loss_of(model, tokens_of(3)).backward()
    moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    assert moved == list(zerocore.planning.predict_events(model))
    used, predicted = zerocore.memory_usage(model), zerocore.planning.predict_memory(model)
    for part in parts:
        assert getattr(used, part) == getattr(predicted, part), part
