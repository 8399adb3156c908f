"""Buffers of all dtypes and shapes are loaded on every rank; what does not fit changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks

ERRORS = (ValueError, TypeError, RuntimeError)


def buffers(seed: int) -> dict[str, Tensor]:
    """As many kinds as there are, with other values for each seed."""
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return {
        "complex": torch.complex(values, -values),
        "conjugate": torch.complex(values, values).conj(),
        "int16": (values * 100).to(torch.int16),
        "uint16": (values.abs() * 100).to(torch.uint16),
        "flags": values > 0,
        "float8": values.to(torch.float8_e4m3fn),
        "brain": values.to(torch.bfloat16),
        "scalar": values[0, 0].clone(),
        "transposed": values.clone().t(),
        "strided": values.clone()[:, ::2],
        "empty": values[:0].clone(),
    }


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4)
        for name, value in buffers(seed).items():
            self.register_buffer(name, value)
        self.phases = nn.Parameter(buffers(seed)["complex"], requires_grad=False)


def load_all() -> None:
    rank = dist.get_rank()
    for stage in (0, 3):
        for broadcast in (True, False):
            model = zerocore.shard(Net(rank + 1), stage=stage)
            saved = Net(0).state_dict()
            given = saved if rank == 0 or not broadcast else {}
            zerocore.load_full_state_dict(model, given, broadcast=broadcast)
            loaded = zerocore.full_state_dict(model, rank0_only=False)
            for key, value in saved.items():
                same = loaded[key].dtype == value.dtype and loaded[key].tolist() == value.tolist()
                assert same, (stage, broadcast, key)
            assert model.strided.stride() == Net(0).strided.stride()  # still in its place


def test_buffers_of_all_kinds() -> None:
    run_ranks(load_all, 2)


def load_wrong() -> None:
    wrong: dict[str, Any] = {
        "int16": torch.zeros(4, 7, dtype=torch.int16),
        "brain": torch.zeros(4, 6, dtype=torch.complex64),
        "layer.weight": torch.zeros(4, 4, dtype=torch.complex64),
        "layer.bias": [0.0] * 4,
        "scalar": 1.0,
    }
    model = zerocore.shard(Net(1))
    before = zerocore.full_state_dict(model, rank0_only=False)
    for key, value in wrong.items():
        given = {**Net(0).state_dict(), key: value} if dist.get_rank() == 0 else {}
        with pytest.raises(ERRORS, match=rf"(buffer|parameter) '{key}'"):
            zerocore.load_full_state_dict(model, given)
    if dist.get_rank() == 1:
        model.register_buffer("int16", torch.zeros(5, dtype=torch.int16))
    with pytest.raises(ERRORS, match=r"buffer 'int16' of shape"):
        zerocore.load_full_state_dict(model, Net(0).state_dict())
    after = zerocore.full_state_dict(model, rank0_only=False)
    assert all(after[k].tolist() == v.tolist() for k, v in before.items() if k != "int16")


def test_wrong_values_change_nothing() -> None:
    run_ranks(load_wrong, 2)


def count_walks() -> None:
    walks: list[nn.Module] = []
    walk = nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.append(self)
        return walk(self, *args, **kwargs)

    for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4)):
        model = zerocore.shard(nn.Sequential(layer), stage=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counted)
            model(torch.ones(2, 4))
    assert not walks


def test_a_forward_does_not_walk_over_modules() -> None:
    run_ranks(count_walks, 2)
