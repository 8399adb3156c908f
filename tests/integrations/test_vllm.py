"""vLLM's source of weights over a sharded model, sent to a process as vLLM's packed engine does.

Without vLLM a stand-in has its two base classes. The packing is a stand-in in any case, as vLLM's
own asks for streams of a device: it holds tensors until a buffer is full, and sends that by one
broadcast.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.weights.test_export import Stack, assert_same

BUFFER = 20_000  # bytes


class Meta(NamedTuple):
    """Of a tensor, as it goes to the process."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stand_in() -> None:
    """Modules of vLLM that have what a source needs, if it is not installed."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return

    names = "vllm", "vllm.distributed", "vllm.distributed.weight_transfer"
    for name in (*names, f"{names[-1]}.base"):
        sys.modules[name] = ModuleType(name)
    base: Any = sys.modules[f"{names[-1]}.base"]
    base.ParamMeta, base.WeightSource = Meta, type("WeightSource", (), {})


def flat_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


def produce(source: Any, group: dist.ProcessGroup) -> int:
    """Packs and sends; returns the number of buffers."""
    held: list[Tensor] = []
    number = 0
    told = iter(source.metadata())
    for name, tensor in source:
        meta = next(told)
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
        held.append(flat_of(tensor))
        if sum(each.numel() for each in held) > BUFFER:
            dist.broadcast(torch.cat(held), 0, group)
            number, held = number + 1, []
    assert next(told, None) is None
    if held:
        dist.broadcast(torch.cat(held), 0, group)
    return number + bool(held)


def consume(metadata: list[Any], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    held: list[Any] = []
    for number, meta in enumerate(metadata):
        held.append(meta)
        sizes = [prod(each.shape) * each.dtype.itemsize for each in held]
        if sum(sizes) > BUFFER or number == len(metadata) - 1:
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.broadcast(data, 0, group)
            for each, part in zip(held, data.split(sizes), strict=True):
                yield each.name, part.view(each.dtype).view(each.shape)
            held = []


def send(dtype: torch.dtype | None) -> None:
    stand_in()
    from zerocore.integrations.vllm import ShardedSource

    trainers, engines = dist.new_group([0, 1]), dist.new_group([0, 2])
    told: list[Any] = [None]
    if dist.get_rank() == 2:  # no rank of the model
        for _ in range(2):
            dist.broadcast_object_list(told, 0, engines)
            metadata, expected = told[0]
            found = dict(consume(metadata, engines))
            assert set(found) == set(expected)
            assert_same(found, expected)
        return
    model = zerocore.shard(Stack(), stage=3, units=["Linear"], group=trainers)
    source = ShardedSource(model, dtype=dtype, max_bytes=1, names=lambda name: f"model.{name}")
    for number in range(2):  # each iteration is an export of its own
        with zerocore.unsharded(model, write_back=True), torch.no_grad():
            model[0].bias.add_(number)
        full = zerocore.full_state_dict(model, rank0_only=False)
        expected = {f"model.{name}": value.to(dtype or value.dtype) for name, value in full.items()}
        if dist.get_rank() == 0:
            metadata = [Meta(m.name, m.dtype, m.shape) for m in source.metadata()]
            dist.broadcast_object_list([(metadata, expected)], 0, engines)
            assert produce(source, engines) > 1
        else:
            assert len(list(source)) == len(expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_packed_weights_arrive(dtype: torch.dtype | None) -> None:
    run_ranks(send, 3, dtype)
