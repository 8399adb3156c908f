"""Muon and owned where units live on several meshes: the bits of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from tests.matrices.test_owned import OPTIMIZERS, make_owned, train_alone
from tests.matrices.whole_matrices import (
    ADAMW,
    Block,
    OneProcess,
    assert_equal,
    full_parameters,
    in_small_rounds,
    is_for_muon,
    make_muon,
    seeded_model,
    train_by_torch,
    train_sharded,
)
from tests.sharding.experts import loss_of, spread_model, whole_model
from tests.sharding.test_experts import CLOSE, EVEN, LAYOUTS, own_of, sharded

BIASES = ["*.experts.bias"]  # of shape (experts, columns): matrices by shape


def train_beside_one_process(model: Any, optimizer: Any, layout: str) -> None:
    """Three steps. Gradients are those of one process on the full batch, to 2e-6; given the same
    ones, matrices are those of torch.optim.Muon on all experts, bit for bit."""
    own = partial(own_of, shape=LAYOUTS[layout][0], bounds=LAYOUTS[layout][1])
    alone = OneProcess(whole_model(), lr=0.02)
    for number in range(3):
        loss_of(model, [dist.get_rank()], number).backward()
        loss_of(alone.model, range(4), number).backward()
        truth = dict(alone.model.named_parameters())
        for name, param in model.named_parameters():
            expected, found = own(name, truth[name].grad), full_of(param.grad)
            torch.testing.assert_close(found, expected, **CLOSE)
            expected.copy_(found)
        for each in (optimizer, alone):
            each.step()
        for each in (model, alone.model):
            each.zero_grad()
        expected = {name: own(name, value) for name, value in alone.parameters().items()}
        found = full_parameters(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert_equal(found, {n: v for n, v in expected.items() if is_for_muon(n, v)})


def muon_of(model: nn.Module) -> zerocore.matrices.Muon:
    named = model.named_parameters()
    return zerocore.matrices.Muon(named, lr=0.02, adamw=ADAMW, adamw_names=BIASES)


@in_small_rounds
def train_experts(stage: int, layout: str) -> None:
    model = sharded(*LAYOUTS[layout], stage)
    optimizer = muon_of(model)
    train_beside_one_process(model, optimizer, layout)
    owners = optimizer.describe().owners["blocks.0.experts.weight"]
    parts = LAYOUTS[layout][0][1]
    assert {owner % parts for owner in owners} == {dist.get_rank() % parts}


@pytest.mark.one_by_day
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_trained_as_in_one_process(stage: int, layout: str) -> None:
    run_ranks(train_experts, 4, stage, layout)


@in_small_rounds
def train_rows() -> None:
    """Of fully_shard: on one mesh, on two, and with replicas."""
    fully_shard = zerocore.fsdp.fully_shard
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    for dense, experts in ((mesh._flatten(), mesh["edp"]), (mesh, mesh["edp"])):
        model = spread_model(mesh.get_group("ep"), EVEN)
        for block in model.blocks:
            fully_shard(block.experts, mesh=experts)
            block.experts.set_gradient_divide_factor(4.0)
            fully_shard(block, mesh=dense)
        fully_shard(model, mesh=dense)
        optimizer = muon_of(model)  # before the first forward
        train_beside_one_process(model, optimizer, "2x2")


def test_fully_sharded_models_are_trained_as_in_one_process() -> None:
    run_ranks(train_rows, 4)


def shard_on_two_meshes(stage: int) -> dict[str, Any]:
    """Options of shard: the second block is on half of the ranks, and whole there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    return {"stage": stage, "groups": {"blocks.1.*": zerocore.ParameterMesh(mesh["edp"])}}


@in_small_rounds
def train_bare_parts() -> None:
    expected = train_by_torch(3, lr=0.02)
    for stage in (0, 1, 3):
        model, _ = train_sharded(partial(make_muon, lr=0.02), 3, **shard_on_two_meshes(stage))
        assert_equal(full_parameters(model), expected)
    for kind in OPTIMIZERS:
        expected, _ = train_alone(kind, 3)
        for stage in (1, 3):
            options = shard_on_two_meshes(stage)
            model, optimizer = train_sharded(partial(make_owned, kind), 3, **options)
            assert_equal(full_parameters(model), expected)
            with pytest.raises(ValueError, match="only some ranks of the model share it"):
                optimizer.state_dict()


@pytest.mark.nightly
def test_whole_tensors_on_a_mesh_of_their_own() -> None:
    run_ranks(train_bare_parts, 4)


def adagrad_in_one_process(model: nn.Module, grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in grads:
        for name, param in model.named_parameters():
            param.grad = step[name]
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def own_rows() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = zerocore.fsdp.fully_shard(whole_model(), mesh=mesh)
    optimizer = zerocore.matrices.owned(torch.optim.Adagrad, model.parameters(), lr=0.1)
    grads = []
    for number in range(3):
        loss_of(model, [dist.get_rank()], number).backward()
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    expected = adagrad_in_one_process(whole_model(), grads)
    assert_equal(full_parameters(model), expected)
    states = optimizer.state_dict()["state"]
    assert [states[i]["sum"].shape for i in states] == [value.shape for value in expected.values()]


def test_owned_takes_fully_sharded_models() -> None:
    run_ranks(own_rows, 4)


def refuse_cut_matrices() -> None:
    model = sharded(*LAYOUTS["2x2"], 3)
    with pytest.raises(ValueError, match=r"experts\.bias' .* dimension 0 through its matrices"):
        zerocore.matrices.Muon(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=r"experts\.\w+' is a part of a larger tensor"):
        zerocore.matrices.owned(torch.optim.Adagrad, model.parameters(), lr=0.01)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    columns = zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"], dim=2)
    model = zerocore.shard(seeded_model(), units=[Block], groups={"*.experts": columns})
    with pytest.raises(ValueError, match=r"0\.experts' .* dimension 2 through its matrices"):
        make_muon(model)


def test_parts_of_matrices_are_refused_by_name() -> None:
    run_ranks(refuse_cut_matrices, 4)
