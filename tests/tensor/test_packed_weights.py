"""Frozen parameters of classes of their own, which carry how they are unpacked: QLoRA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

WAYS = (0, 1, 2, 3, "fsdp")


class Packed(nn.Parameter):
    """Whole numbers with a scale that is an attribute, and a mark for the optimizer's groups."""

    def __new__(cls, data: Tensor) -> Any:
        scale = data.abs().max() / 127
        packed: Any = torch.Tensor._make_subclass(cls, (data / scale).round().to(torch.int8), False)
        packed.scale, packed.is_packed = scale, True
        return packed


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randn(32, 32))
        self.low = nn.Linear(32, 4, bias=False)
        self.high = nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, Packed):  # as bitsandbytes does
            self.weight = Packed(self.weight.float())
        base: Tensor = x @ (self.weight.float() * self.weight.scale)
        adapted: Tensor = self.high(self.low(x))
        return base + adapted


def stand_in() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(PackedLinear(), nn.Tanh(), PackedLinear())


def qlora() -> nn.Module:
    import bitsandbytes
    import peft

    torch.manual_seed(0)

    def linear() -> nn.Module:
        made: nn.Module = bitsandbytes.nn.Linear4bit(
            64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        # Where a processor has AVX512-BF16, an evaluation gives the weight another shape.
        made.support_avx512bf16_for_cpu = False
        return made

    model = nn.Sequential(linear(), nn.Tanh(), linear()).to("cpu")  # which quantises
    config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False, r=4)
    adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


def shard_by(way: Any, model: Any) -> Any:
    if way == "fsdp":
        for module in (model[0], model[2], model):
            zerocore.fsdp.fully_shard(module)
        return model
    return zerocore.shard(model, stage=way)


def train(model: Any, width: int) -> list[Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = []
    for step in range(4):
        x = torch.randn(8, width, generator=generator)
        with torch.no_grad():
            results.append(model(x).detach())
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
        model.train(step % 2 == 0)
    return results


def beside_ddp(kind: str) -> None:
    build, width = (qlora, 64) if kind == "qlora" else (stand_in, 32)
    expected = train(DistributedDataParallel(build()), width)
    for way in WAYS:
        print(way, flush=True)
        model = shard_by(way, build())
        torch.testing.assert_close(train(model, width), expected, rtol=1e-4, atol=1e-6)
        if kind == "stand_in" and way != "fsdp":
            marked = [param for param in model.parameters() if hasattr(param, "is_packed")]
            assert len(marked) == 2 and torch.equal(marked[0].scale, stand_in()[0].weight.scale)
        if kind == "qlora" and way != "fsdp":
            names = set(copy.copy(model.state_dict()))
            assert names == set(build().state_dict()), names


def test_packed_weights_train_as_under_ddp() -> None:
    run_ranks(beside_ddp, 2, "stand_in")


def test_qlora_trains_as_under_ddp() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    run_ranks(beside_ddp, 2, "qlora", timeout=120.0)
