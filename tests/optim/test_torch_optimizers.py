"""torch.optim optimizers work on local shards as they do on whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _foreach_supported_types

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    STEPS,
    MakeOptimizer,
    Optimizer,
    Trained,
    accumulate,
    assert_same_training,
    case_named,
    compare_with_one_process,
    train_reference,
)

IMPLEMENTATIONS = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Without the noise that Adam makes of zero gradients; see training.adamw.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=3e-3, eps=1e-5),
    "adamw": partial(torch.optim.AdamW, lr=3e-3, eps=1e-5, weight_decay=0.1),
}
AWKWARD = ("scalars", "empty_shards", "mixed_dtypes", "frozen")


def train_awkward(stage: int, optimizer: str, implementation: str) -> None:
    """Every other model; any two of model, stage, optimizer and implementation meet."""
    make_optimizer = partial(OPTIMIZERS[optimizer], **IMPLEMENTATIONS[implementation])
    number = list(OPTIMIZERS).index(optimizer) + list(IMPLEMENTATIONS).index(implementation)
    for name in AWKWARD[(stage + number) % 2 :: 2]:
        compare_with_one_process(name, stage, make_optimizer)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_implementation(stage: int, optimizer: str, implementation: str) -> None:
    run_ranks(train_awkward, 3, stage, optimizer, implementation)


def grouped(parameters: Iterable[nn.Parameter]) -> Optimizer:
    even, odd = _halves(parameters)
    groups = [{"params": even, "lr": 1e-3}, {"params": odd, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)


def added(parameters: Iterable[nn.Parameter]) -> Optimizer:
    even, odd = _halves(parameters)
    optimizer = torch.optim.AdamW(even, lr=3e-3, eps=1e-5)
    optimizer.add_param_group({"params": odd, "lr": 1e-2})
    return optimizer


def _halves(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    listed = list(parameters)
    return listed[::2], listed[1::2]


@pytest.mark.parametrize("make_optimizer", [grouped, added])
def test_parameter_groups(stage: int, make_optimizer: MakeOptimizer) -> None:
    run_ranks(compare_with_one_process, 2, "plain", stage, make_optimizer)


def train_zeroing(stage: int, set_to_none: bool) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for step in range(STEPS):
        losses.append(accumulate(model, case, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in model.parameters():
            if set_to_none:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad))
    expected = train_reference(case, dist.get_world_size(), OPTIMIZERS["adamw"])
    state = zerocore.full_state_dict(model, rank0_only=False)
    rank = dist.get_rank()
    assert_same_training(
        [Trained([losses], state)], Trained([expected.losses[rank]], expected.state)
    )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(stage: int, set_to_none: bool) -> None:
    run_ranks(train_zeroing, 2, stage, set_to_none)


def look_at_shards(stage: int) -> tuple[list[tuple[int, int]], list[int]]:
    case = case_named("scalars")
    plain = dict(case.seeded_build().named_parameters())
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    ranges = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
        assert type(parameter) in _foreach_supported_types
        assert parameter.local().dim() == 1 and parameter.fqn == name
        assert parameter.shape == parameter.global_shape == plain[name].shape
        start, end = parameter.shard_range
        assert parameter.local().numel() == end - start
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        ranges.append((start, end))
    return ranges, [parameter.numel() for parameter in plain.values()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_local_shards(stage: int, world_size: int) -> None:
    answers = run_ranks(look_at_shards, world_size, stage)
    numels = answers[0][1]
    for index, numel in enumerate(numels):
        owned = [ranges[index] for ranges, _ in answers]
        if stage == 0:
            assert owned == [(0, numel)] * world_size
        else:
            elements = [element for start, end in owned for element in range(start, end)]
            assert elements == list(range(numel))
