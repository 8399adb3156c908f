"""Ordinary scripts give the same under DDP, ``torch.distributed.fsdp`` and ``zerocore.fsdp``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import run_ranks
from tests.fsdp.both import ENGINES, loss_of, make_net, shard_blocks, tokens_of

Script = Callable[[list[Any]], list[float]]


def average_and_evaluate(models: list[Any]) -> list[float]:
    """An average of the weights, and evaluation with other shapes in the middle of accumulation."""
    (model,) = models
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = [param.detach().clone() for param in model.parameters()]
    seen = []
    for step in range(5):
        for micro in range(2):
            loss = loss_of(model, tokens_of(step, micro)) / 2
            loss.backward()
            seen.append(loss.item())
            if micro == 0:  # after the last one FSDP2's root would show full parameters below
                model.eval()
                with torch.no_grad():
                    seen.append(loss_of(model, tokens_of(step, 7)[:3, :4]).item())
                model.train()
        optimizer.step()
        optimizer.zero_grad()
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.1)
    return seen + sums_of(average)


def student_and_teacher(models: list[Any]) -> list[float]:
    """Two models in one loss; the second one is frozen in turn, and called twice in a step."""
    student, teacher = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen = []
    for step in range(6):
        tokens = tokens_of(step)
        teacher.requires_grad_(step % 2 == 0)
        wanted = teacher(tokens).float().softmax(-1)
        found = student(tokens).float().softmax(-1)
        loss = (found - wanted).square().sum() + loss_of(student, tokens) + loss_of(teacher, tokens)
        loss.backward()
        seen.append(loss.item())
        for optimizer in optimizers[: 2 - step % 2]:
            optimizer.step()
            optimizer.zero_grad()
    return seen + sums_of([param.detach() for model in models for param in model.parameters()])


def sums_of(tensors: list[Tensor]) -> list[float]:
    """Sums of full values."""
    full = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return [value.double().square().sum().item() for value in full]


def compare(script: Script, num_models: int) -> None:
    nets: list[nn.Module] = [make_net() for _ in range(num_models)]
    for net in nets[1:]:
        net.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    ddp = [DistributedDataParallel(copy.deepcopy(net)) for net in nets]
    expected = script(ddp)
    for name, fsdp in ENGINES.items():
        found = script([shard_blocks(fsdp, copy.deepcopy(net)) for net in nets])
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_average_of_weights_and_evaluation_between_micro_batches() -> None:
    run_ranks(compare, 2, average_and_evaluate, 1)


def test_two_models_one_of_which_is_frozen_in_turn() -> None:
    run_ranks(compare, 2, student_and_teacher, 2)
