"""Allocations that really fail, in a process with little address space, and what is said then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.scripts import run_program

WIDTH = 64
HUGE = 1 << 40  # elements; nobody has that much
MIXED = zerocore.MixedPrecision(torch.bfloat16)

SCRIPT = """
import resource, sys, torch, zerocore
from torch import nn

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return x + torch.ones(400 << 20, dtype=torch.uint8)[0] if where == "forward" else x * 1
    @staticmethod
    def backward(ctx, grad):
        torch.ones(400 << 20, dtype=torch.uint8)
        return grad, None

class Block(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(64, 64), where
    def forward(self, x):
        return self.linear(x) if self.where is None else Greedy.apply(self.linear(x), self.where)

where = sys.argv[1]
zerocore.emulate(4, "inf", 0)
blocks = [Block(where if index == 2 and where != "step" else None) for index in range(4)]
if where == "step":
    blocks.append(nn.Linear(64, 1 << 19, bias=False))  # 32 MiB for each moment on each rank
model = zerocore.shard(nn.Sequential(*blocks), stage=3)
optimizer = zerocore.optim.AdamW(model.parameters())

def leave(room):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

try:
    if where in ("forward", "backward"):
        leave(200 << 20)
    model(torch.randn(2, 64)).sum().backward()
    if where == "step":
        leave(16 << 20)
    elif where == "other":
        leave(200 << 20)
        with zerocore.reporting.explain_out_of_memory(model):
            torch.ones(400 << 20, dtype=torch.uint8)
    optimizer.step()
except torch.OutOfMemoryError as error:
    found = error.diagnosis
    print("PHASE", found.phase)
    print("UNIT", found.unit)
    print("REQUESTED", found.requested)
    print("BUCKETS", [name for name, _ in found.buckets])
    print("POOL", found.held["bucket pool, in use"])
    print("CAUSE", type(error.__cause__).__name__)
    print(error)
"""


def run(where: str) -> dict[str, str]:
    ((code, output),) = run_program(SCRIPT, 1, where)
    assert code == 0, output
    lines = [line.partition(" ") for line in output.splitlines()]
    return {key: value for key, _, value in lines if key.isupper()} | {"TEXT": output}


@pytest.mark.parametrize(
    ("where", "phase", "unit", "nbytes"),
    [
        ("forward", "forward", "2", 400 << 20),
        pytest.param("backward", "backward", "2", 400 << 20, marks=pytest.mark.nightly),
        ("step", "optimizer step", "", 4 * 64 * ((1 << 19) + 4 * 65) // 4),  # all five layers
        pytest.param("other", "optimizer step or other", "", 400 << 20, marks=pytest.mark.nightly),
    ],
)
def test_a_failed_allocation_is_explained(where: str, phase: str, unit: str, nbytes: int) -> None:
    found = run(where)
    assert (found["PHASE"], found["REQUESTED"]) == (phase, str(nbytes))
    assert unit in found["UNIT"].split(", ")
    assert found["CAUSE"] == "RuntimeError"
    assert "tried to allocate" in found["TEXT"]
    assert "ranks: saves" in found["TEXT"]
    if unit:
        assert unit in found["BUCKETS"]
        assert int(found["POOL"]) > 0
    else:
        assert found["BUCKETS"] == "[]"


class Failing(nn.Module):
    """A layer that may fail in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.linear(x)


@pytest.fixture
def emulated() -> Iterator[None]:
    with zerocore.emulate(4, "inf", 0):
        yield


def make(stage: int, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = zerocore.shard(nn.Sequential(Failing(), Failing(), Failing()), stage=stage, **options)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("mixed", [None, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_by_category_and_what_would_fit(
    emulated: None, stage: int, mixed: zerocore.MixedPrecision | None
) -> None:
    model, optimizer = make(stage, mixed_precision=mixed)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    totals = [zerocore.planning.predict_memory(model, each).reserved for each in range(4)]
    model[1].error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 KiB.")
    with pytest.raises(zerocore.reporting.OutOfMemory) as caught:
        model(torch.randn(2, WIDTH))
    found, usage = caught.value.diagnosis, zerocore.memory_usage(model, optimizer)
    assert found.requested == 1536
    assert found.held["parameters"] == usage.parameters
    assert found.held["gradients"] == usage.gradients
    assert found.held["optimizer state"] == usage.optimizer
    assert found.held["main weights"] == usage.main_weights
    assert (usage.main_weights > 0) == (mixed is not None)
    saved = {text.partition(" (")[0]: nbytes for text, nbytes in found.changes}
    for higher in range(stage + 1, 4):
        assert saved[f"stage={higher}"] == totals[stage] - totals[higher]
    assert ("8 ranks" in saved) == (stage > 0)
    on_demand = "communication=zerocore.Communication(prefetch=0)"
    assert (on_demand in saved) == (stage == 3)
    assert bool(found.buckets) == (stage == 3)
    assert "enough for this request" in str(found)


@pytest.mark.parametrize("mixed", [None, MIXED], ids=["plain", "mixed"])
def test_fewer_replicas_where_there_are_several(
    emulated: None, mixed: zerocore.MixedPrecision | None
) -> None:
    model, optimizer = make(3, group=init_device_mesh("cpu", (2, 2)), mixed_precision=mixed)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    before = zerocore.memory_usage(model, optimizer)
    model[1].error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 KiB.")
    with pytest.raises(zerocore.reporting.OutOfMemory) as caught:
        model(torch.randn(2, WIDTH))
    saved = dict(caught.value.diagnosis.changes)["group= a (1, 4) mesh (gathers reach further)"]
    model, optimizer = make(3, group=init_device_mesh("cpu", (1, 4)), mixed_precision=mixed)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    assert saved == before.reserved - zerocore.memory_usage(model, optimizer).reserved


def test_predictions_refuse_numbers_that_cannot_be(emulated: None) -> None:
    model, _ = make(3)
    for predict, options, error in (
        (zerocore.planning.predict_memory, {"stage": 4}, ValueError),
        (zerocore.planning.predict_memory, {"stage": "3"}, TypeError),
        (zerocore.planning.predict_memory, {"optimizer_states": -1}, ValueError),
        (zerocore.planning.predict_memory, {"micro_batches": 0}, ValueError),
        (zerocore.planning.predict_events, {"micro_batches": 1.5}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            predict(model, **options)


def test_other_errors_stay_as_they_are(emulated: None) -> None:
    model, _ = make(3)
    for error in (RuntimeError("no"), ValueError("no"), KeyboardInterrupt()):
        model[1].error = error
        with pytest.raises(type(error)) as caught:
            model(torch.randn(2, WIDTH))
        assert caught.value is error
        with pytest.raises(type(error)) as caught, zerocore.reporting.explain_out_of_memory(model):
            raise error
        assert caught.value is error


def test_training_goes_on_afterwards(emulated: None) -> None:
    model, optimizer = make(3)
    model[2].error = MemoryError()
    with pytest.raises(zerocore.reporting.OutOfMemory, match="in the forward of unit '2'"):
        model(torch.randn(2, WIDTH))
    model[2].error = None
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_through_no_sharded_model_is_left_alone(emulated: None, stage: int) -> None:
    model, _ = make(stage)  # it is alive, and at stage 0 its parameters are always full
    model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError, match="allocate") as caught:
        fail_backward(torch.ones(2, requires_grad=True))
    assert not isinstance(caught.value, zerocore.reporting.OutOfMemory)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_through_one_of_two_models(emulated: None, stage: int) -> None:
    other, _ = make(3 - stage)
    model, _ = make(stage)
    model[1].linear.register_forward_hook(lambda _layer, _args, y: allocate_in_backward(y))
    with pytest.raises(zerocore.reporting.OutOfMemory, match="in the backward") as caught:
        (other(torch.randn(2, WIDTH)) + model(torch.randn(2, WIDTH))).sum().backward()
    with pytest.raises(zerocore.reporting.OutOfMemory, match="in the backward") as caught:
        model(torch.randn(2, WIDTH)).sum().backward()
    held = caught.value.diagnosis.held
    assert held["parameters"] == zerocore.memory_usage(model).parameters
    other(torch.randn(2, WIDTH)).sum().backward()


def allocate_in_backward(x: Tensor) -> None:
    x.register_hook(lambda grad: torch.empty(HUGE))


def fail_backward(x: Tensor) -> None:
    y = x.clone()
    allocate_in_backward(y)
    y.sum().backward()


def test_backward_is_wrapped_once(emulated: None) -> None:
    make(3)
    wrapped = torch.autograd.backward
    make(3)
    assert torch.autograd.backward is wrapped
