"""Optimizers of libraries whose states have 8 or 4 bits, and others that need full parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]  # of parameters


def seeded() -> nn.Sequential:
    """Matrices whose blocks of 256 elements lie on two ranks, and small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 129), nn.Tanh(), nn.Linear(129, 64), nn.Linear(64, 3))


@cache
def gradients(step: int) -> list[Tensor]:
    """The averaged ones, so that optimizers are compared and not reductions."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in seeded().parameters()]


def take_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        for param, grad in zip(model.parameters(), gradients(step), strict=True):
            param.grad = grad.clone()
        optimizer.step()


def full(model: Any) -> dict[str, Tensor]:
    return zerocore.full_state_dict(model, rank0_only=False)


def train(named: dict[str, Make], owned: bool, stages: tuple[int, ...], close: float = 0.0) -> None:
    """As one process, bit for bit; with a stop in between, and states for one process. ``close``
    is the difference of optimizers that take norms and means, which the ranks add in parts."""
    for name, make in named.items():
        plain = seeded()
        alone = make(plain.parameters())
        take_steps(plain, alone, range(3))
        for stage in stages:
            print(name, stage, flush=True)
            model: Any = zerocore.shard(seeded(), stage=stage)

            def build(model: nn.Module = model, make: Any = make) -> Any:
                if not owned:
                    return make(model.parameters())
                return zerocore.matrices.owned(make.func, model.parameters(), **make.keywords)

            optimizer = build()
            take_steps(model, optimizer, range(2))
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build()
            optimizer.load_state_dict(saved)
            take_steps(model, optimizer, range(2, 3))
            torch.testing.assert_close(
                full(model), dict(plain.state_dict()), rtol=close, atol=close / 10
            )


def bitsandbytes_owned(stages: tuple[int, ...]) -> None:
    from bitsandbytes import optim

    warnings.filterwarnings("ignore", "Paged optimizers")
    named = {
        "AdamW8bit": partial(optim.AdamW8bit, lr=1e-2),
        "Lion8bit": partial(optim.Lion8bit, lr=1e-3),
        "PagedAdamW8bit": partial(optim.PagedAdamW8bit, lr=1e-2, weight_decay=0.1),
        "SGD8bit": partial(optim.SGD8bit, lr=1e-2, momentum=0.9),
        "LAMB32bit": partial(optim.LAMB32bit, lr=1e-2, max_unorm=1.0),
    }
    train(named, True, stages)


def bitsandbytes_as_they_are(stages: tuple[int, ...]) -> None:
    from bitsandbytes import optim

    named = {
        "AdamW32bit": partial(optim.AdamW32bit, lr=1e-2),
        "SGD32bit": partial(optim.SGD32bit, lr=1e-2, momentum=0.9, weight_decay=0.1),
        "Lion32bit": partial(optim.Lion32bit, lr=1e-3),
        "AdamW8bit": partial(optim.AdamW8bit, lr=1e-2),  # gathers
    }
    train(named, False, stages)
    train({"LAMB32bit": partial(optim.LAMB32bit, lr=1e-2, max_unorm=1.0)}, False, stages, 1e-4)


def torchao_owned(stages: tuple[int, ...]) -> None:
    from torchao import optim

    torch._dynamo.reset()
    classes = (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8)
    train({cls.__name__: partial(cls, lr=1e-2) for cls in classes}, True, stages)


def transformers_owned(stages: tuple[int, ...]) -> None:
    from transformers.optimization import Adafactor

    given = partial(Adafactor, lr=1e-2, relative_step=False)
    train({"Adafactor": partial(Adafactor), "given": given}, True, stages)
    train({"Adafactor": partial(Adafactor), "given": given}, False, stages, 1e-5)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("package", "function", "stages"),
    [
        ("bitsandbytes", bitsandbytes_owned, (0, 3)),
        *by_night(("bitsandbytes", bitsandbytes_as_they_are, (1, 2))),
        ("bitsandbytes", bitsandbytes_as_they_are, (0, 3)),
        *by_night(("torchao", torchao_owned, (0, 3))),  # compiled
        ("transformers", transformers_owned, (0, 3)),
    ],
)
def test_optimizers_of_libraries(
    package: str, function: Callable[..., None], stages: tuple[int, ...]
) -> None:
    pytest.importorskip(package)
    run_ranks(function, 3, stages, timeout=240.0)
