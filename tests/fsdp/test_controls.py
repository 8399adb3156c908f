"""The settings of a module do as under ``torch.distributed.fsdp``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    Net,
    Trained,
    check_same,
    loss_of,
    make_net,
    shard_blocks,
    tokens_of,
    train,
    train_both,
)
from zerocore.fsdp.group import group_of
from zerocore.model.state import state_of


def options(**given: Any) -> Any:
    return lambda fsdp, model: train(shard_blocks(fsdp, model, **given))


def accumulates(fsdp: Any, model: Any) -> Trained:
    """Two micro-batches without communication, then one with."""
    shard_blocks(fsdp, model)

    def step(model: Any, index: int) -> float:
        total = 0.0
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_is_last_backward(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            loss = loss_of(model, tokens_of(index, micro)) / 3
            loss.backward()
            total += loss.item()
            if micro < 2 and index == 0:
                assert all(param.grad is None for param in shards_of(model))
        return total

    return train(model, step)


def shards_of(model: Any) -> list[Any]:
    """The DTensors, also of modules that show full parameters now."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return list(model.parameters())


def unshards_by_hand(fsdp: Any, model: Any) -> Trained:
    shard_blocks(fsdp, model)

    def step(model: Any, index: int) -> float:
        handles = [block.unshard(async_op=True) for block in model.blocks]
        handles[0].wait()
        assert not isinstance(model.blocks[0].out.weight, DTensor)
        loss = loss_of(model, tokens_of(index))
        model.head.weight.sum()  # the root's, which stay until the backward
        loss.backward()
        model.blocks[1].unshard()
        assert tuple(model.blocks[1].up.weight.shape) == (13, 10)
        assert not isinstance(model.blocks[1].up.weight, DTensor)
        model.blocks[1].reshard()
        assert isinstance(model.blocks[1].up.weight, DTensor)
        return loss.item()

    return train(model, step)


def divides(fsdp: Any, model: Any) -> Trained:
    shard_blocks(fsdp, model)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
    return train(model)


def hints(fsdp: Any, model: Any) -> Trained:
    shard_blocks(fsdp, model)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    model.blocks[0].set_unshard_in_backward(True)
    model.set_reshard_after_forward(False, recurse=True)
    fsdp.share_comm_ctx([model])
    return train(model)


def ignores(fsdp: Any, model: Any) -> Trained:
    scales = {block.scale for block in model.blocks}
    for scale in scales:
        scale.requires_grad_(False)
    shard_blocks(fsdp, model, ignored_params=scales)
    assert all(not isinstance(block.scale, DTensor) for block in model.blocks)
    for block in model.blocks:
        del block.scale
        block.scale = 1.0
    return train(model)


def narrows(fsdp: Any, model: Any) -> Trained:
    """In bfloat16, with gradients and the output in float32."""
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fsdp.fully_shard(model, mp_policy=policy)
    assert model(tokens_of(0)).dtype == torch.float32
    model.reshard()  # else FSDP2 gives the optimizer full parameters of the root
    # A fused step changes DTensors without counting it in their versions.
    return train(model, make_optimizer=partial(torch.optim.AdamW, fused=True))


def freezes(fsdp: Any, model: Any) -> Trained:
    """Frozen at first, thawed after two steps."""
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    shard_blocks(fsdp, model)

    def step(model: Any, index: int) -> float:
        if index == 2:
            for module in (model, *model.blocks):
                module.reshard()
            model.requires_grad_(True)
        loss = loss_of(model, tokens_of(index))
        loss.backward()
        return loss.item()

    return train(model, step)


def stays_frozen(fsdp: Any, model: Any) -> Trained:
    model.blocks[1].requires_grad_(False)
    return narrows(fsdp, model)


def calls_a_method(fsdp: Any, model: Any) -> Trained:
    fsdp.register_fsdp_forward_method(nn.Linear(1, 1), "forward")  # nothing
    shard_blocks(fsdp, model)
    model.scores = model.forward
    fsdp.register_fsdp_forward_method(model, "scores")

    def step(model: Any, index: int) -> float:
        loss = loss_of(model.scores, tokens_of(index))
        loss.backward()
        return loss.item()

    return train(model, step)


def checkpoints(fsdp: Any, model: Any) -> Trained:
    shard_blocks(fsdp, model)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, run=forward: checkpoint(run, x, use_reentrant=False)
    return train(model)


def groups_modules(fsdp: Any, model: Any) -> Trained:
    fsdp.fully_shard([model.blocks[0], model.blocks[1]])
    fsdp.fully_shard([model.blocks[2], model.head])
    trained = train(fsdp.fully_shard(model))
    if fsdp is zerocore.fsdp:  # the two of a group may have parameters of the same name
        names = {param.fqn for param in state_of(model).params()}
        assert names == {name for name, _ in model.named_parameters()}
    return trained


def uses_less_later(fsdp: Any, model: Any) -> Trained:
    """From the third step on one block is called and left out of the loss, on all ranks."""
    shard_blocks(fsdp, model)
    forward = model.blocks[2].forward

    def step(model: Any, index: int) -> float:
        if index == 2:
            model.blocks[2].forward = lambda x: x + 0 * forward(x).detach()
        loss = loss_of(model, tokens_of(index))
        loss.backward()
        assert all((param.grad is None) == (index > 1) for param in model.blocks[2].parameters())
        return loss.item()

    return train(model, step)


def train_with_all() -> None:
    for run in (
        options(reshard_after_forward=False),
        options(reshard_after_forward=2),
        accumulates,
        unshards_by_hand,
        divides,
        hints,
        ignores,
        freezes,
        calls_a_method,
        checkpoints,
        groups_modules,
        uses_less_later,
    ):
        check_same(train_both(run))
    for run in (
        narrows,
        options(mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        stays_frozen,
    ):
        check_same(train_both(run), rtol=2e-2, atol=2e-3)


def test_controls_are_those_of_fsdp2() -> None:
    run_ranks(train_with_all, 2, timeout=180)


def reshards_to_two() -> None:
    """On 4 ranks: the values of FSDP2, with gathers from two ranks after the first of a step."""
    check_same(train_both(options(reshard_after_forward=2)))
    model = make_net()
    for block in model.blocks:
        zerocore.fsdp.fully_shard(block, reshard_after_forward=2)
    zerocore.fsdp.fully_shard(model)
    loss_of(model, tokens_of(0)).backward()
    counters = group_of(model).engine.counters
    assert counters["gather_near"].count == len(model.blocks)
    model.set_reshard_after_forward(True)
    loss_of(model, tokens_of(0)).backward()
    assert group_of(model).engine.counters["gather_near"].count == 0


def test_a_number_of_ranks_reshards_to_near_ranks() -> None:
    run_ranks(reshards_to_two, 4, timeout=120)


def test_ddp_leaves_sharded_modules_alone() -> None:
    run_ranks(replicate_around, 2, timeout=60)


def replicate_around() -> None:
    """DDP takes what is left of a model whose blocks are sharded, and nothing of those."""

    def run(fsdp: Any, model: Any) -> Trained:
        for block in model.blocks:
            fsdp.fully_shard(block)
        replicate(model)

        def step(model: Any, index: int) -> float:
            loss = loss_of(model, tokens_of(index))
            loss.backward()
            return loss.item()

        trained = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for index in range(3):
            trained.append(step(model, index))
            optimizer.step()
            optimizer.zero_grad()
        values = {
            name: param.full_tensor() if isinstance(param, DTensor) else param.detach()
            for name, param in model.named_parameters()
        }
        assert not isinstance(model.head.weight, DTensor)
        return Trained(trained, [], values)

    check_same(train_both(run))


def train_hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    check_same(train_both(options(mesh=mesh)))

    def without_all_reduce(fsdp: Any, model: Any) -> Trained:
        shard_blocks(fsdp, model, mesh=mesh)

        def step(model: Any, index: int) -> float:
            total = 0.0
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                loss = loss_of(model, tokens_of(index, micro)) / 2
                loss.backward()
                total += loss.item()
            return total

        return train(model, step)

    check_same(train_both(without_all_reduce))


@pytest.mark.nightly
def test_replicas_of_shards_are_those_of_fsdp2() -> None:
    run_ranks(train_hybrid, 4, timeout=120)


def train_from_meta() -> None:
    def run(fsdp: Any, model: Any) -> Trained:
        with torch.device("meta"):
            empty = Net()
        shard_blocks(fsdp, empty)
        assert all(param.is_meta for param in empty.parameters())
        optimizer_sees = list(empty.parameters())
        empty.to_empty(device="cpu")
        with torch.no_grad():
            for name, param in empty.named_parameters():
                value = dict(model.named_parameters())[name]
                param.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        value, param.device_mesh, param.placements
                    )
                )
        assert all(a is b for a, b in zip(optimizer_sees, empty.parameters(), strict=True))
        return train(empty)

    check_same(train_both(run))


@pytest.mark.nightly
def test_models_on_the_meta_device_are_filled_as_with_fsdp2() -> None:
    run_ranks(train_from_meta, 3, timeout=120)


def move_between_steps() -> None:
    def run(fsdp: Any, model: Any) -> Trained:
        shard_blocks(fsdp, model)

        def step(model: Any, index: int) -> float:
            if index == 2:
                model.cpu()
            loss = loss_of(model, tokens_of(index))
            loss.backward()
            return loss.item()

        return train(model, step)

    check_same(train_both(run))
    model = shard_blocks(zerocore.fsdp, make_net())
    first = loss_of(model, tokens_of(0))
    model.double()
    assert model.head.weight.dtype == torch.float64
    torch.testing.assert_close(loss_of(model, tokens_of(0)), first)


@pytest.mark.nightly
def test_a_model_may_be_moved_between_steps() -> None:
    run_ranks(move_between_steps, 2, timeout=120)
