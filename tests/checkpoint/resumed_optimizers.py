"""Optimizers of a public collection, saved and loaded in each way, beside plain torch."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerocore
from tests.checkpoint.saved_nets import shared_folder

Make = Callable[[Any], Any]


class Net(nn.Module):
    """A matrix, vectors, and parameters of one element, with and without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(x)))) * self.scale


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, optimizer: Any, begin: int, steps: int) -> None:
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(5, 4)) - 1).square().mean().backward()
        optimizer.step()


def in_full(model: nn.Module, optimizer: Any, fresh: Any, again: nn.Module) -> None:
    state = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)
    file = io.BytesIO()
    torch.save(state, file)  # nothing of it is a part
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))


def own(model: nn.Module, optimizer: Any, fresh: Any, again: nn.Module) -> None:
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def with_torch(model: nn.Module, optimizer: Any, fresh: Any, again: nn.Module) -> None:
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(again, fresh, state)


def with_torch_in_full(model: nn.Module, optimizer: Any, fresh: Any, again: nn.Module) -> None:
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(again, fresh, state, options=options)


def in_a_checkpoint(model: nn.Module, optimizer: Any, fresh: Any, again: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(shared_folder(folder))
        zerocore.Checkpoints(place, model, optimizer).save(1).wait()
        zerocore.Checkpoints(place, again, fresh).load()
        dist.barrier()


WAYS = {
    "full": in_full,
    "own": own,
    "torch": with_torch,
    "torch in full": with_torch_in_full,
    "checkpoints": in_a_checkpoint,
}


def plain_resumes(make: Make) -> bool | str:
    """Whether plain torch resumes with the optimizer; an error's text where it does not train."""
    try:
        model = build()
        optimizer = make(model.parameters())
        train(model, optimizer, 0, 3)
        again = build()
        fresh = make(again.parameters())
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 3, 3)
        train(again, fresh, 3, 3)
    except Exception as error:
        return repr(error)
    values = zip(model.parameters(), again.parameters(), strict=True)
    return all(torch.equal(own, other) for own, other in values)


def plain_resumes_with(make: Make, way: str) -> bool:
    """Whether plain torch resumes so; its functions take neither deques nor global states."""
    try:
        models = [build(), build()]
        optimizers = [make(model.parameters()) for model in models]
        train(models[0], optimizers[0], 0, 3)
        models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
        WAYS[way](models[0], optimizers[0], optimizers[1], models[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 3, 3)
    except Exception:
        return False
    return all(map(torch.equal, *(model.parameters() for model in models)))


def resume(make: Make, stage: int, way: str, to_stage: int | None = None) -> str:
    """``resumes``, ``refused: ...`` where the optimizer trains no shards, else what went wrong."""
    model = zerocore.shard(build(), stage=stage)
    try:
        optimizer = make(model.parameters())
        train(model, optimizer, 0, 3)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"refused: {error!r}"
    again = zerocore.shard(build(), stage=stage if to_stage is None else to_stage)
    zerocore.load_full_state_dict(again, zerocore.full_state_dict(model))
    fresh = make(again.parameters())
    WAYS[way](model, optimizer, fresh, again)
    train(model, optimizer, 3, 3)
    train(again, fresh, 3, 3)
    ends = [zerocore.full_state_dict(each, rank0_only=False) for each in (model, again)]
    for name, value in ends[0].items():
        if not torch.equal(value, ends[1][name]):
            return f"'{name}' is another: {(value - ends[1][name]).abs().max().item():.2e}"
    return "resumes"
