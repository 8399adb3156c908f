"""Traces, exports and counts of FLOPs of a model in training; one rank may make them alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

KINDS = (0, 1, 3, "fsdp")


class Net(nn.Module):
    """Two layers; the root reads the weight of the first one again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum() * self.first.weight.sum()


def shard(net: nn.Module, kind: int | str) -> nn.Module:
    if kind == "fsdp":
        for module in (net.first, net.second, net):
            zerocore.fsdp.fully_shard(module)
        return net
    return zerocore.shard(net, stage=kind, units=[nn.Linear])


def whole(model: nn.Module, kind: int | str) -> dict[str, Any]:
    if kind == "fsdp":
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return zerocore.full_state_dict(model, rank0_only=False)


def inputs() -> Tensor:
    return torch.ones(2, 4)


def traced_by_jit(model: nn.Module) -> Any:
    return torch.jit.trace(model, inputs())(inputs()).detach()


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (inputs(),)).module()(inputs()).detach()


def traced_by_fx(model: nn.Module) -> Any:
    return make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(inputs())(
        inputs()
    ).detach()


def counted(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 4)).sum().backward()
    return counter.get_total_flops()


def train_beside(look: Callable[[nn.Module, nn.Module], None], kind: int | str, net: type) -> None:
    """Rank 0 looks at the model in between; the others go on."""
    plain, model = net(), shard(net(), kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        look(model, deepcopy(plain))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(inputs()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    look(model, deepcopy(plain))
    torch.testing.assert_close(whole(model, kind), dict(plain.state_dict()))


def look_inside(model: nn.Module, plain: nn.Module) -> None:
    with zerocore.unsharded(model):
        if dist.get_rank() == 0:
            for make in (traced_by_jit, exported, traced_by_fx, counted):
                torch.testing.assert_close(make(model), make(plain))
            assert all(param.grad is None for param in model.parameters())


def count_outside(model: nn.Module, plain: nn.Module) -> None:
    is_whole = type(model.scale) is nn.Parameter
    if dist.get_rank() == 0:
        assert counted(model) == counted(plain) > 0
    if dist.get_rank() == 0 and not is_whole:
        with pytest.raises(RuntimeError, match="' is sharded, and a trace does not gather it"):
            torch.jit.trace(model, inputs())
    with FakeTensorMode(allow_non_fake_inputs=True):  # on all ranks, also around a gather
        inside = zerocore.unsharded(model) if hasattr(model.scale, "local") else nullcontext()
        with inside:
            assert model(torch.ones(2, 4)).shape == (2, 4)


def look(kind: int | str) -> None:
    if kind != "fsdp":
        train_beside(look_inside, kind, Reading)
    train_beside(count_outside, kind, Net if kind == "fsdp" else Reading)


@pytest.mark.parametrize("kind", KINDS)
def test_traces_send_nothing(kind: int | str) -> None:
    run_ranks(look, 2, kind)


def count_before_the_first_forward() -> None:
    model = shard(Net(), "fsdp")
    if dist.get_rank() == 0:
        assert counted(model) == counted(Net())
    model(inputs()).sum().backward()


def test_a_count_before_the_first_forward_makes_no_engine() -> None:
    run_ranks(count_before_the_first_forward, 2)


def keep_mixed_precision() -> None:
    policy = zerocore.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float16)
    model = zerocore.shard(Net(), stage=3, mixed_precision=policy)
    with FakeTensorMode():
        assert model(torch.ones(2, 4)).dtype == torch.float16
    with zerocore.unsharded(model):
        assert exported(model).dtype == torch.float16


def test_a_trace_casts_as_a_call_does() -> None:
    run_ranks(keep_mixed_precision, 2)
