"""Gradients under no_sync are each rank's own, as DistributedDataParallel's, or an error."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks


class Net(nn.Module):
    """Odd shapes, a scalar, and one that is not C-contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(5, 7)
        self.head = nn.Sequential(nn.Linear(7, 41), nn.Tanh(), nn.Linear(41, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.linear(self.conv(x).mean((2, 3)) * self.scale))
        return y


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, 3, 6, 6, generator=generator)


def plain_of(grad: Any) -> Tensor:
    """The gradient in full, as this rank reads it."""
    assert grad is not None
    full: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full.clone()


def backward(model: nn.Module, ddp: nn.Module, step: int, sync: bool) -> None:
    for each, silent in ((model, zerocore.no_sync(model)), (ddp, ddp.no_sync())):  # type: ignore[operator]
        with nullcontext() if sync else silent:
            each(batch(step)).square().sum().backward()


def make(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    plain = Net()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, **options)
    return model, DistributedDataParallel(plain, find_unused_parameters=False)


def compare(model: nn.Module, ddp: Any, exact: bool) -> None:
    tolerance = 0.0 if exact else 1e-6
    for (name, param), other in zip(model.named_parameters(), ddp.module.parameters(), strict=True):
        found = plain_of(param.grad)
        torch.testing.assert_close(found, other.grad, rtol=tolerance, atol=tolerance, msg=name)


def accumulate(stage: int, options: dict[str, Any]) -> None:
    model, ddp = make(stage, **options)
    for step in range(2):
        for micro in range(3):
            backward(model, ddp, 10 * step + micro, sync=False)
            compare(model, ddp, exact=True)
            norms = [
                nn.utils.clip_grad_norm_(each.parameters(), 0.5) if step else total(each)
                for each in (model, ddp)
            ]
            torch.testing.assert_close(norms[0], norms[1])
        if step == 1:
            grads = [each.grad for each in model.parameters()]
            kept = [None if grad is None else plain_of(grad) for grad in grads]
        backward(model, ddp, 10 * step + 4, sync=True)
        compare(model, ddp, exact=False)
        if step == 0:
            zerocore.clip_grad_norm_(model, 0.1)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            compare(model, ddp, exact=False)
            for each in (model, ddp):
                each.zero_grad()
    for grad in grads:
        if stage == 1:
            with pytest.raises(RuntimeError, match="is held back"):  # its memory has been reduced
                grad.clone()  # type: ignore[union-attr]
    assert len(kept) == len(grads)


def total(module: nn.Module) -> Tensor:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if isinstance(module, DistributedDataParallel):
        return nn.utils.get_total_norm(grads)
    return zerocore.clip_grad_norm_(module, float("inf"))


@pytest.mark.parametrize("options", [{}, {"reduce": True}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_own_gradients(stage: int, world_size: int, options: dict[str, bool]) -> None:
    given: dict[str, Any] = {}
    if options.get("reduce"):
        wire = zerocore.MixedPrecision(wire_dtype=torch.float32)
        given = {"mixed_precision": wire}
    run_ranks(accumulate, world_size, stage, given)


def replicate(stage: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    accumulate(stage, {"group": mesh})


@pytest.mark.parametrize("stage", [0, 1])
def test_own_gradients_with_replicas(stage: int) -> None:
    run_ranks(replicate, 4, stage)


def step_alone() -> None:
    """Local SGD: the weights of the ranks part, as under DDP."""
    model, ddp = make(0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ddp)]
    for step in range(3):
        backward(model, ddp, step, sync=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for param, other in zip(model.parameters(), ddp.module.parameters(), strict=True):
            assert torch.equal(plain_of(param.detach()), other.detach())


def test_steps_without_sync() -> None:
    run_ranks(step_alone, 2)


READS: dict[str, Any] = {
    "norm": lambda p: p.grad.norm(),
    "sum": lambda p: p.grad.sum(),
    "clone": lambda p: p.grad.clone(),
    "detach": lambda p: p.grad.detach(),
    "data": lambda p: p.grad.data,
    "full": lambda p: p.grad.full_tensor(),
    "local": lambda p: p.grad.local(),
    "mul_": lambda p: p.grad.mul_(0.5),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_own": lambda p: zerocore.clip_grad_norm_([p], 1.0),
    "assign": lambda p: setattr(p, "grad", torch.ones(p.shape)),
}


def refuse(stage: int, options: dict[str, Any]) -> None:
    model, ddp = make(stage, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, ddp, 0, sync=False)
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.shape == param.shape
        for each, read in READS.items() if stage > 1 else ():
            with pytest.raises(RuntimeError, match=f"'{name}' is held back.*no_sync"):
                read(param)
                pytest.fail(each)
    before = [plain_of(param.detach()) for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"step: the gradient of 'scale' was not"):
        optimizer.step()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(plain_of(param.detach()), value)
    backward(model, ddp, 1, sync=True)  # all is well afterwards
    compare(model, ddp, exact=False)
    optimizer.step()
    optimizer.zero_grad()
    ddp.zero_grad()
    with torch.no_grad():
        for param, other in zip(model.parameters(), ddp.module.parameters(), strict=True):
            other.copy_(plain_of(param))
    backward(model, ddp, 2, sync=True)
    backward(model, ddp, 3, sync=False)  # on top of an average
    backward(model, ddp, 4, sync=True)
    compare(model, ddp, exact=False)


@pytest.mark.parametrize("mode", ["sharded", "full"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_held_back(stage: int, world_size: int, mode: str) -> None:
    run_ranks(refuse, world_size, stage, {"communication": zerocore.Communication(accumulate=mode)})
