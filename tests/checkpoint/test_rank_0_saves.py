"""``torch.save`` on rank 0: the file that DDP would write, or an error that names the line."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.checkpoint.saved_nets import AwkwardNet
from tests.distributed.harness import run_ranks


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> dict[str, Tensor]:
    return dict(torch.load(io.BytesIO(data)))


def trained_pair(stage: int, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A sharded model and a plain one, two equal steps old, and the first one's optimizer."""
    torch.manual_seed(0)
    plain = AwkwardNet().eval()  # no dropout
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (model, plain)]
    for _ in range(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, plain, optimizers[0]


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * 4 * 9).view(4, 4, 3, 3)


def assert_file_of(plain: nn.Module, data: bytes) -> None:
    expected, found = loaded(saved(plain.state_dict())), loaded(data)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is Tensor and found[key].stride() == value.stride(), key
        torch.testing.assert_close(found[key], value)
    assert found["head.weight"].data_ptr() == found["tied.weight"].data_ptr()
    assert len(data) <= len(saved(plain.state_dict())) + 1024
    AwkwardNet().load_state_dict(found)


def save_alone(stage: int, path: Path) -> None:
    model, plain, optimizer = trained_pair(stage)
    if dist.get_rank() == 0:
        state = model.state_dict()
        if stage < 3:
            assert_file_of(plain, saved(state))
            copies: list[Any] = [copy.deepcopy(state), {k: v.cpu() for k, v in state.items()}]
            copies += [{k: v.clone() for k, v in state.items()}]
            for each in copies:
                torch.testing.assert_close(loaded(saved(each)), loaded(saved(state)))
            halves = loaded(saved({k: v.bfloat16() for k, v in state.items() if v.numel() > 1}))
            assert halves["head.weight"].dtype == torch.bfloat16
            torch.save(state, path)
        else:
            refused(lambda: state, r"'\S+'.* \d+ of \d+ elements \(\d+:\d+\).*full_state_dict")
        lines = r"full_optimizer_state_dict.*Checkpoints"
        if stage > 0:
            refused(optimizer.state_dict, rf"'\S+'.* \d+ of \d+ elements \(\d+:\d+\).*{lines}")
        else:
            torch.save(optimizer.state_dict(), path.with_suffix(".optimizer"))
    dist.barrier()
    model(batch()).square().mean().backward()  # the model goes on
    if stage > 0:
        refused(lambda: next(model.parameters()).grad, r"gradient of '\S+'.*\d of \d+")
    optimizer.step()


def refused(value: Callable[[], Any], match: str, kind: type[Exception] = TypeError) -> None:
    with pytest.raises(kind, match=match):
        saved(value())


PLAIN = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert all(type(value) is torch.Tensor for value in state.values())
assert "zerocore" not in sys.modules
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_rank_0_alone(stage: int, world_size: int, tmp_path: Path) -> None:
    run_ranks(save_alone, world_size, stage, tmp_path / "model.pt")
    for path in tmp_path.iterdir():
        subprocess.run([sys.executable, "-c", PLAIN, path], check=path.suffix == ".pt")


def save_behind_a_change(stage: int) -> None:
    model, plain, optimizer = trained_pair(stage)
    state = model.state_dict()
    data = saved(state)
    assert_file_of(plain, data)
    old = copy.deepcopy(state)
    model(batch()).square().mean().backward()
    optimizer.step()
    refused(lambda: old, r"'\S+'.*copy.*full_state_dict\(model\)", RuntimeError)
    for param in model.parameters():
        if param.requires_grad:
            param.data.mul_(0.5)
    line = r"'\S+'.*\d+ of \d+ elements.*forward.*full_state_dict\(model\)"
    refused(lambda: state, line, RuntimeError)
    model(batch())
    half = {k: v.clone() for k, v in state.items()}
    half["head.weight"].mul_(0.5)  # values of its own
    refused(lambda: half, r"'\S+'.*\d+ of \d+ elements")
    zerocore.load_full_state_dict(model, loaded(data))
    model(batch())
    assert_file_of(plain, saved(model.state_dict()))


@pytest.mark.parametrize("stage", [1, 2])
def test_values_of_before_the_last_change(stage: int) -> None:
    run_ranks(save_behind_a_change, 2, stage)


def save_main_weights() -> None:
    mixed = zerocore.MixedPrecision(torch.bfloat16, torch.float32)
    for options in ({"mixed_precision": mixed}, {"offload": zerocore.Offload(states="cpu")}):
        torch.manual_seed(0)
        model = zerocore.shard(nn.Linear(8, 9), stage=2, **options)
        model(torch.ones(2, 8)).sum().backward()
        zerocore.optim.AdamW(model.parameters()).step()
        model(torch.ones(2, 8))
        if "offload" in options:
            full = zerocore.full_state_dict(model, rank0_only=False)
            torch.testing.assert_close(loaded(saved(model.state_dict())), full, rtol=0, atol=0)
        else:
            refused(model.state_dict, r"'weight'.* of 72 elements")


def test_main_weights_are_no_model_weights() -> None:
    run_ranks(save_main_weights, 2)


def load_parts(stage: int) -> None:
    """A file of one rank's part says what it is, wherever it is loaded."""
    model, _, _ = trained_pair(stage)
    parts = {
        k: v.own_part() if zerocore.is_sharded(v) else v for k, v in model.state_dict().items()
    }
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, saved(parts))
    first = loaded(files[0])
    with pytest.raises((TypeError, RuntimeError), match=r"full tensor|part of one rank"):
        zerocore.load_full_state_dict(model, first)
    with pytest.raises(RuntimeError, match=r"part of one rank.*\d+:\d+.*full_state_dict"):
        first["cube"].mean()
    with pytest.raises(RuntimeError, match=r"one rank"):
        AwkwardNet().load_state_dict(first)
    match = r"from a file with one rank's part"
    with pytest.raises((ValueError, RuntimeError), match=match):  # rank 1's, on all
        model.load_state_dict(first)


def test_a_file_of_one_part_says_so() -> None:
    run_ranks(load_parts, 2, 3)
