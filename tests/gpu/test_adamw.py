"""AdamW on a GPU: torch's numbers, launches, no waiting, capture in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerocore
from tests.gpu.profiled import names_of_work
from tests.kernels.adamw_cases import KINDS, OPTIONS, check_adamw, make_lists
from zerocore.optim import AdamW


@pytest.mark.parametrize("count", [1, 2, 13, 150, 600])
@pytest.mark.parametrize(("weight", "grad", "model"), KINDS)
def test_steps(
    device: torch.device,
    weight: torch.dtype,
    grad: torch.dtype,
    model: torch.dtype | None,
    count: int,
) -> None:
    check_adamw(device.type, weight, grad, model, count)


@pytest.mark.parametrize(("count", "calls"), [(1, 1), (128, 1), (512, 1), (600, 2)])
def test_two_launches_for_five_hundred_tensors(cuda: torch.device, count: int, calls: int) -> None:
    lists = make_lists(count, cuda.type)
    lists.step(lr=1e-3)
    work = names_of_work(lambda: lists.step(lr=1e-3))
    assert ["adamw_kernel" in name for name in work] == [False, True] * calls, work


def test_nothing_waits_for_the_device(cuda: torch.device) -> None:
    lists = make_lists(20, cuda.type)
    numbers = {name: torch.ones((), device=cuda) for name in ("lr_tensor", "grad_scale")}
    found_inf = torch.zeros((), device=cuda)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lists.step(lr=0.0, found_inf=found_inf, **numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(device: torch.device, make: Any, stage: int | None, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(3))).to(device)
    if stage is not None:
        zerocore.shard(model, stage=stage)
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.full((4, 33), step + 1.0, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone().flatten() for param in model.parameters()]


def test_training_is_that_of_torch(device: torch.device, stage: int) -> None:
    expected = train(device, torch.optim.AdamW, None)
    found = train(device, AdamW, stage)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_captured_step(cuda: torch.device) -> None:
    """Replays count steps and read a learning rate that lies on the device."""
    params = [nn.Parameter(torch.ones(1000, device=cuda)) for _ in range(3)]
    others = [nn.Parameter(torch.ones(1000, device=cuda)) for _ in range(3)]
    for param in (*params, *others):
        param.grad = torch.full_like(param, 0.5)
    lr = torch.tensor(1e-2, device=cuda)
    optimizer = AdamW(params, lr=lr, clip_grad_norm=1.0)
    expected = AdamW(others, lr=1e-2, clip_grad_norm=1.0)
    optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    lr.fill_(1e-3)
    graph.replay()
    for value in (1e-2, 1e-2, 1e-3):
        expected.param_groups[0]["lr"] = value
        expected.step()
    assert optimizer.state[params[0]]["step"] == 3
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", OPTIONS)
def test_found_inf_changes_nothing(device: torch.device, options: dict[str, Any]) -> None:
    lists = make_lists(13, device.type)
    before = lists.clone()
    lists.step(**options, found_inf=torch.ones((), device=device))
    for found, kept in zip(lists.all(), before.all(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, kept, strict=True))
