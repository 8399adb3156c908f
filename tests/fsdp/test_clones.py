"""Frozen copies of models of ``zerocore.fsdp``, beside copies of a plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import zerocore
import zerocore.fsdp
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.fsdp.both import Net, full_params, loss_of, make_net, shard_blocks, tokens_of
from zerocore.model.state import state_of

NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
GRIDS = zerocore.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype=torch.int8)


class Buffered(Net):
    """With a buffer, a frozen parameter and two that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[1].norm.weight.requires_grad_(False)
        self.register_buffer("shift", torch.full((7,), 0.25))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.shift


def make_buffered() -> Buffered:
    torch.manual_seed(0)
    return Buffered()


def last_dim(param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    even = param.dim() > 1 and param.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even else None


def distill(student: nn.Module, teacher: nn.Module, step: int) -> Tensor:
    """A loss with a term that keeps the model near its copy, as of a reference policy."""
    tokens = tokens_of(step)
    with torch.no_grad():
        target = teacher(tokens).float()
    return loss_of(student, tokens) + (student(tokens).float() - target).square().mean()


def train(student: nn.Module, teacher: nn.Module, plain: bool) -> list[float]:
    params = [param for param in student.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=True)
    losses = []
    for step in range(3):
        loss = distill(student, teacher, step)
        loss.backward()
        for param in params if plain else ():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens_of(9)).float()


def check_clone(make: Any, options: dict[str, Any]) -> None:
    narrow = "mp_policy" in options
    plain = make()
    teacher = copy.deepcopy(plain).eval()
    model = shard_blocks(zerocore.fsdp, make(), **options)
    copied = zerocore.clone_sharded(model, make)
    assert type(copied) is type(model) and not copied.training
    assert [*copied.state_dict()] == [*model.state_dict()]
    for name, param in copied.named_parameters():
        assert isinstance(param, DTensor) and not param.requires_grad, name
        assert param.placements == model.get_parameter(name).placements
        assert param.dtype == (torch.bfloat16 if narrow else torch.float32)
    usage = zerocore.memory_usage(copied)
    assert usage.gradients == usage.optimizer == usage.main_weights == 0
    assert state_of(copied).config.offload is None
    assert torch.equal(answers(copied), answers(model))
    old = answers(copied)
    found, expected = train(model, copied, False), train(plain, teacher, True)
    tolerance = {"rtol": 5e-2, "atol": 2e-2} if narrow else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **tolerance)
    torch.testing.assert_close(old, answers(teacher), **tolerance)
    assert torch.equal(answers(copied), old)  # it has stayed
    zerocore.weights.copy_weights(model, copied)
    assert torch.equal(answers(copied), answers(model.eval()))
    assert not torch.equal(answers(copied), old)


def check_clones() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": NARROW}):
        check_clone(make_net, options)
    check_clone(make_buffered, {})
    check_clone(make_net, {"shard_placement_fn": last_dim})
    check_clone(make_net, {"mp_policy": GRIDS})
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        check_clone(make_net, {"mesh": mesh})
        check_clone(make_net, {"reshard_after_forward": 2})


@pytest.mark.parametrize("world_size", [*by_night(2, 4), 3])
def test_a_clone_answers_as_the_model_did(world_size: int) -> None:
    run_ranks(check_clones, world_size, timeout=180)


def copy_between_kinds() -> None:
    """Weights go to models that are cut in another way, from rows to elements and back."""
    rows = shard_blocks(zerocore.fsdp, make_net())
    expected = zerocore.full_state_dict(rows, rank0_only=False)
    torch.manual_seed(1)
    columns = shard_blocks(zerocore.fsdp, Net(), shard_placement_fn=last_dim)
    flat = zerocore.shard(Net())
    for target in (flat, columns):
        zerocore.weights.copy_weights(rows, target)
        found = zerocore.full_state_dict(target, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for param in rows.parameters():
        nn.init.zeros_(param)
    zerocore.weights.copy_weights(flat, rows)
    for name, value in full_params(rows).items():
        assert torch.equal(value, expected[name]), name


def test_weights_go_between_the_kinds() -> None:
    run_ranks(copy_between_kinds, 2)


def ignore_and_refuse() -> None:
    net = make_net()
    block = net.blocks[1]
    ignored = {block.norm.weight}
    for each in net.blocks:
        zerocore.fsdp.fully_shard(each, ignored_params=ignored)
    model = zerocore.fsdp.fully_shard(net, ignored_params=ignored)
    with torch.no_grad():
        block.norm.weight.fill_(0.5)
    copied = zerocore.clone_sharded(model, make_net)
    assert torch.equal(copied.blocks[1].norm.weight, block.norm.weight)
    assert torch.equal(answers(copied), answers(model.eval()))
    for wrong in (lambda: Net(num_blocks=2), lambda: Net(width=8)):
        with pytest.raises(ValueError, match=r"different parameters, such as '\w"):
            zerocore.clone_sharded(model, wrong)
    with pytest.raises(ValueError, match="different parameters, such as 'shift'"):
        zerocore.clone_sharded(shard_blocks(zerocore.fsdp, make_net()), WithShift)
    with pytest.raises(TypeError, match="pass make="):
        zerocore.clone_sharded(model)


class WithShift(Net):
    """With a buffer that the model lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(7))


def test_what_is_ignored_is_copied_and_another_model_is_refused() -> None:
    run_ranks(ignore_and_refuse, 2)
