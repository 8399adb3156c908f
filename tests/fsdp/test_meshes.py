"""Modules over several meshes: experts that only some ranks share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks
from tests.sharding.experts import assert_follows_plan, loss_of, spread_model, whole_model
from tests.sharding.test_experts import EVEN, UNEVEN, own_of

Gradients = dict[str, Tensor]


def shard_by_calls(engine: Any, model: Any, experts: Any, whole: Any, factor: Any) -> None:
    """A call for the experts of a block, one for the rest."""
    for block in model.blocks:
        engine.fully_shard(block.experts, mesh=experts)
        if factor is not None:
            block.experts.set_gradient_divide_factor(factor)
        engine.fully_shard(block, mesh=whole)
    engine.fully_shard(model, mesh=whole)


def shard_by_placements(engine: Any, model: Any, experts: Any, whole: Any, factor: Any) -> None:
    """One call for a block, whose experts get a mesh of their own."""
    infos = [_get_mesh_info(mesh) for mesh in (experts, whole)]
    for block in model.blocks:
        own = set(block.experts.parameters())
        engine.fully_shard(
            block,
            mesh=whole,
            shard_placement_fn=lambda param, own=own: common.ShardPlacementResult(
                Shard(0), infos[0] if param in own else infos[1]
            ),
        )
        if factor is not None:
            block.set_gradient_divide_factor(factor)
    engine.fully_shard(model, mesh=whole)


WAYS = [shard_by_calls]
if hasattr(common, "ShardPlacementResult"):  # torch 2.12 and later
    WAYS.append(shard_by_placements)


def gradients(
    module: object, bounds: list[int], factor: float | None, shard: Any = shard_by_calls
) -> list[Gradients]:
    """Of three steps of AdamW, full over the ranks that share each parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = spread_model(mesh.get_group("ep"), bounds)
    shard(module, model, mesh["edp"], whole, factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    found = []
    for number in range(3):
        loss_of(model, [dist.get_rank()], number).backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        found.append({name: grad.full_tensor() for name, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def beside_fsdp2(shard: Any) -> None:
    own, theirs = (gradients(each, EVEN, None, shard) for each in (zerocore_fsdp, torch_fsdp))
    for step, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.one_by_day
@pytest.mark.parametrize("shard", WAYS)
def test_gradients_are_those_of_fsdp2(shard: Any) -> None:
    """Divided by the ranks of each module's own mesh, as FSDP2 does."""
    run_ranks(beside_fsdp2, 4, shard)


def beside_one_process(shard: Any) -> None:
    truth = whole_model()
    loss_of(truth, range(4), 0).backward()
    first = gradients(zerocore_fsdp, EVEN, 4.0, shard)[0]
    for name, param in truth.named_parameters():
        expected = own_of(name, param.grad, (2, 2), EVEN)
        torch.testing.assert_close(first[name], expected, rtol=2e-6, atol=2e-7)


def clip_by_torch() -> None:
    """Torch's function on DTensors of two meshes, where torch's own would stack their norms."""
    norms = []
    for owner in (nn.utils, zerocore):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = spread_model(mesh.get_group("ep"), EVEN)
        shard_by_calls(zerocore_fsdp, model, mesh["edp"], whole, None)
        loss_of(model, [dist.get_rank()], 0).backward()
        full = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        norms.append(owner.clip_grad_norm_(model.parameters(), 0.1).item())
    assert norms[0] == norms[1] == pytest.approx(full.norm().item(), rel=1e-5)


def test_torchs_clipping_takes_several_meshes() -> None:
    run_ranks(clip_by_torch, 4)


@pytest.mark.one_by_day
@pytest.mark.parametrize("shard", WAYS)
def test_gradients_are_those_of_one_process(shard: Any) -> None:
    run_ranks(beside_one_process, 4, shard)


def follow_the_plan() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = spread_model(mesh.get_group("ep"), EVEN)
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block.experts, mesh=mesh["edp"], reshard_after_forward=2)
    zerocore_fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, [dist.get_rank()], 0).backward()
    assert_follows_plan(model, optimizer, partial(loss_of, model, [dist.get_rank()]))


def test_the_plan_is_what_happens() -> None:
    run_ranks(follow_the_plan, 4)


def refuse() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zerocore_fsdp.fully_shard(model[0])
    zerocore_fsdp.fully_shard(model, mesh=mesh["edp"])
    with pytest.raises(ValueError, match=r"module '0' is sharded over .* a mesh of the root's"):
        model(torch.ones(1, 4))
    model = spread_model(mesh.get_group("ep"), UNEVEN)
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block.experts, mesh=mesh["edp"])
    zerocore_fsdp.fully_shard(model)
    loss_of(model, [dist.get_rank()], 0).backward()
    with pytest.raises(ValueError, match="only some ranks of the model share it"):
        zerocore.Checkpoints("nowhere", model).save(1)


def test_what_is_refused() -> None:
    run_ranks(refuse, 4)
