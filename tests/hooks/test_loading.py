"""Hooks and overrides of loading run in each way to load, as in plain torch."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.checkpoint.commit import files


class Renamed(nn.Linear):
    """Loads the name that it once had."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "old" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Counted(nn.Linear):
    """Saves extra state that is no tensor, and a tensor that its files hold in another form."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = 0
        self.register_buffer("tens", torch.ones(2))
        self.register_load_state_dict_pre_hook(self.divide)
        self.register_state_dict_post_hook(self.multiply)

    @staticmethod
    def multiply(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        for name in ("tens", "weight"):
            state_dict[prefix + name] = state_dict[prefix + name] * 10

    @staticmethod
    def divide(module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("tens", "weight"):
            state_dict[prefix + name] = state_dict[prefix + name] / 10

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Renamed(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = Counted(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


def pair(stage: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net()
    plain.second.calls = 5
    return zerocore.shard(copy.deepcopy(plain), stage=stage), plain


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    found, expected = zerocore.full_state_dict(model, rank0_only=False), plain.state_dict()
    assert list(found) == list(expected)
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value


def load_in_full(stage: int) -> None:
    model, plain = pair(stage)
    assert_equal(model, plain)
    full: Any = zerocore.full_state_dict(model, rank0_only=False)
    assert full._metadata == plain.state_dict()._metadata
    torch.manual_seed(1)
    other = Net()
    other.second.calls = 9
    state: Any = copy.deepcopy(other.state_dict())
    state["first.old"] = state.pop("first.weight")
    plain.load_state_dict(state)
    for broadcast in (True, False):
        given = state if dist.get_rank() == 0 or not broadcast else None
        zerocore.load_full_state_dict(model, given, broadcast=broadcast)
        assert_equal(model, plain)
        model, _ = pair(stage)
    model.load_state_dict(state)
    assert_equal(model, plain)
    del state["norm.num_batches_tracked"]  # as files of torch 0.3 lack it
    del state._metadata
    plain.load_state_dict(state)
    zerocore.load_full_state_dict(model, state)
    assert_equal(model, plain)
    state["first.old"] = torch.zeros(1)
    with pytest.raises((ValueError, RuntimeError), match=r"first\.weight"):
        zerocore.load_full_state_dict(model, state)
    assert_equal(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_full_state_dicts(stage: int) -> None:
    run_ranks(load_in_full, 2, stage)


def load_files(folder: Path) -> None:
    model, plain = pair(3)
    plain.state_dict()
    zerocore.Checkpoints(folder / "c", model).save(1).wait()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.second.calls = 0
    zerocore.Checkpoints(folder / "c", model).load()
    assert_equal(model, plain)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"second.(_extra_state|weight).*full_state_dict"
    ):
        zerocore.save_safetensors(model, folder / "s")


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(load_files, 2, tmp_path)


def load_safetensors(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = zerocore.shard(nn.Sequential(Renamed(4, 4), nn.BatchNorm1d(4)), stage=3)
    before = zerocore.full_state_dict(model, rank0_only=False)
    zerocore.save_safetensors(model, folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    names = {"0.weight": "0.old"}
    zerocore.load_safetensors(model, folder, rename=names)
    torch.testing.assert_close(zerocore.full_state_dict(model, rank0_only=False), before)


def test_safetensors(tmp_path: Path) -> None:
    run_ranks(load_safetensors, 2, tmp_path / "s")


def assign(stage: int) -> None:
    model, plain = pair(stage)
    torch.manual_seed(1)
    state = copy.deepcopy(Net().state_dict())
    plain.load_state_dict(copy.deepcopy(state), assign=True)
    model.load_state_dict(copy.deepcopy(state), assign=True)
    assert_equal(model, plain)
    model(torch.ones(2, 4)).sum().backward()
    halves = {k: v.half() if isinstance(v, Tensor) else v for k, v in state.items()}
    if stage == 0:
        model.load_state_dict(halves, assign=True)  # copies
        assert next(model.parameters()).dtype == torch.float32
        return
    with pytest.raises((ValueError, RuntimeError), match=r"first\.weight.*float16"):
        model.load_state_dict(halves, assign=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_assign(stage: int) -> None:
    run_ranks(assign, 2, stage)


def fail_to_write(folder: Path) -> None:
    model = zerocore.shard(nn.Linear(40, 40), stage=3)
    write, lists = files.write, files.write_file

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, real in (("write", write), ("write_file", lists)):
        setattr(files, name, full)
        try:
            with pytest.raises((OSError, RuntimeError), match="No space"):
                zerocore.save_safetensors(model, folder)
        finally:
            setattr(files, name, real)
        dist.barrier()
        assert not folder.exists() or list(folder.iterdir()) == []
        dist.barrier()
    zerocore.save_safetensors(model, folder)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(fail_to_write, 2, tmp_path / "s")
