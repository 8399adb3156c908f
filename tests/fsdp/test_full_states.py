"""Full values of models that ``fully_shard`` has sharded, and what ``shard`` offers for both."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ENGINES, loss_of, make_net, shard_blocks, tokens_of

OPTIMIZERS: list[Any] = [torch.optim.AdamW, zerocore.optim.AdamW]


def compare_states(number: int) -> None:
    make = OPTIMIZERS[number]
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model = zerocore.fsdp.fully_shard(copy.deepcopy(plain))
    states = []
    for net, optimizer in ((plain, torch.optim.AdamW), (model, make)):
        step = optimizer(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(2, 5)).square().sum().backward()
            step.step()
            step.zero_grad()
        states.append(step)
    right = states[0].state_dict()
    found = zerocore.full_optimizer_state_dict(states[1])
    if dist.get_rank() > 0:
        assert found == {}
        found = zerocore.full_optimizer_state_dict(states[1], rank0_only=False)
    else:
        zerocore.full_optimizer_state_dict(states[1], rank0_only=False)
    for index, values in right["state"].items():
        for key, value in values.items():
            each = found["state"][index][key]
            assert type(each) is torch.Tensor, key
            torch.testing.assert_close(each, value, check_dtype=False)


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("world_size", [2, 4])
def test_states_are_full(number: int, world_size: int) -> None:
    run_ranks(compare_states, world_size, number)


def copy_gradients() -> None:
    model = shard_blocks(zerocore.fsdp, make_net())
    loss_of(model, tokens_of(0)).backward()
    for param, copied in zip(model.parameters(), copy.deepcopy([*model.parameters()]), strict=True):
        assert torch.equal(copied, param) and copied is not param
        if param.grad is not None:
            assert torch.equal(copied.grad, param.grad)
            assert torch.equal(copy.deepcopy(param.grad), param.grad)


def test_parameters_and_gradients_are_copied() -> None:
    run_ranks(copy_gradients, 2)


def read_and_write_in_full(policy: MixedPrecisionPolicy) -> None:
    plain = make_net()
    model = shard_blocks(zerocore.fsdp, copy.deepcopy(plain), mp_policy=policy)
    narrow = policy.param_dtype or torch.float32
    with zerocore.unsharded(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, plain.get_parameter(name).to(narrow)), name
    inner = model.blocks[1]
    with zerocore.unsharded(inner, write_back=True), torch.no_grad():
        inner.up.weight.mul_(2)
    plain.blocks[1].up.weight.data.mul_(2)
    full = zerocore.full_state_dict(model, rank0_only=False)
    assert full.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        near = value.to(narrow).float() if name == "blocks.1.up.weight" else value
        assert torch.equal(full[name], near), name
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"), zerocore.unsharded(model):
        inner.up.weight.data.mul_(2)
    assert (zerocore.full_state_dict(model) == {}) == (dist.get_rank() > 0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parameters_are_read_and_written_in_full(dtype: torch.dtype | None) -> None:
    run_ranks(read_and_write_in_full, 3, MixedPrecisionPolicy(dtype))


def accumulate() -> None:
    grads = []
    for kind in ("torch", "zerocore"):
        model: Any = shard_blocks(ENGINES[kind], make_net())
        for micro in range(3):
            context = nullcontext()
            if kind == "torch":
                model.set_requires_gradient_sync(micro == 2)
            elif micro < 2:
                context = zerocore.no_sync(model)
            with context:
                loss_of(model, tokens_of(0, micro)).backward()
            if kind == "zerocore" and micro < 2:
                assert all(param.grad is None for param in model.parameters())
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_accumulate_without_communication() -> None:
    run_ranks(accumulate, 2)


def columns_of(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 and param.shape[-1] == 10 else None


def load_in_full(folder: str, dim: int) -> None:
    """Values of a plain model, and files that either face loads."""
    plain = make_net()
    options: Any = {}
    if dim == 1:
        options["shard_placement_fn"] = columns_of
    model = shard_blocks(zerocore.fsdp, make_net(), **options)
    for param in plain.parameters():
        param.data.add_(1)
    values = dict(plain.state_dict())
    given = values if dist.get_rank() == 0 else None
    zerocore.load_full_state_dict(model, given)
    found = zerocore.full_state_dict(model, rank0_only=False)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    with pytest.raises((ValueError, RuntimeError), match="missing"):
        zerocore.load_full_state_dict(model, {})
    tokens = tokens_of(0)
    torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))
    zerocore.save_safetensors(model, folder)
    loaded = zerocore.shard(make_net())
    zerocore.load_safetensors(loaded, folder)
    again = shard_blocks(zerocore.fsdp, make_net(), **options)
    zerocore.load_safetensors(again, folder)
    for other in (loaded, again):
        found = zerocore.full_state_dict(other, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in values.items())
    torch.testing.assert_close(loss_of(again, tokens), loss_of(plain, tokens))


@pytest.mark.parametrize("dim", [0, 1])
def test_full_values_are_loaded(dim: int, tmp_path: Path) -> None:
    run_ranks(load_in_full, 2, str(tmp_path / "saved"), dim)


def load_with_an_ignored_parameter() -> None:
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignored: Any = plain[1].weight
    model = zerocore.fsdp.fully_shard(plain, ignored_params={ignored})
    values = {
        name: torch.ones(4, *([4] if name.endswith("weight") else []))
        for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    zerocore.load_full_state_dict(model, values if dist.get_rank() == 0 else None)
    assert ignored.requires_grad and torch.equal(ignored.detach(), values["1.weight"])


def test_ignored_parameters_are_loaded() -> None:
    run_ranks(load_with_an_ignored_parameter, 2)


def call_a_method() -> None:
    plain = nn.Linear(3, 3)
    plain.double = lambda: plain.weight * 2  # type: ignore[assignment]
    expected = plain.weight.detach() * 2
    model = zerocore.fsdp.fully_shard(plain)
    zerocore.register_forward_method(model, "double")
    assert torch.equal(model.double(), expected)
    with pytest.raises(ValueError, match="no method 'triple'"):
        zerocore.register_forward_method(model, "triple")


def test_other_methods_gather() -> None:
    run_ranks(call_a_method, 2)
