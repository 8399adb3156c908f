"""Models that tensor parallelism has cut, sharded over data parallelism, beside one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from tests.sharding.experts import assert_follows_plan
from tests.sharding.tensor_parallel import cut_model, loss_of, whole_model

CLOSE = {"rtol": 2e-6, "atol": 2e-7}
SHAPES = {"2x2": (2, 2), "1x4": (1, 4)}  # data by tensor parallelism
Clip = Callable[..., Tensor]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicas", "dp", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(shape: tuple[int, ...], stage: int, **options: Any) -> tuple[nn.Module, int, int]:
    """The model, this rank of data parallelism, and the number of these."""
    mesh = mesh_of(shape)
    data = mesh["dp"] if len(shape) == 2 else mesh["replicas", "dp"]
    model = zerocore.shard(cut_model(mesh["tp"]), stage=stage, group=data, **options)
    return model, dist.get_rank() // shape[-1], dist.get_world_size() // shape[-1]


def whole_of(value: Any) -> Tensor:
    """The full value on all ranks of tensor parallelism; at stage 0 some values are plain."""
    return value.whole_tensor() if hasattr(value, "whole_tensor") else full_of(value)


def assert_same(model: nn.Module, truth: nn.Module, **close: float) -> None:
    full = zerocore.full_state_dict(model, rank0_only=False)
    for name, param in truth.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), **close)


def train(
    stage: int, shape: tuple[int, ...], clip: Clip, micro_batches: int, **options: Any
) -> None:
    """Three steps: gradients, norm and weights are those of one process."""
    model, rank, num = sharded(shape, stage, **options)
    truth = whole_model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, truth)]
    for number in range(3):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with nullcontext() if is_last else zerocore.no_sync(model):
                loss_of(model, [rank], number + 10 * micro).backward()
            loss_of(truth, range(num), number + 10 * micro).backward()
        for (name, param), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
            found = whole_of(param.grad)
            torch.testing.assert_close(
                found, whole.grad, msg=lambda text, of=name: of + text, **CLOSE
            )
        norms = clip(model.parameters(), 0.1), nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        torch.testing.assert_close(*norms, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, truth, rtol=1e-5, atol=2e-6)


def train_all_ways(stage: int, shape: tuple[int, ...]) -> None:
    train(stage, shape, zerocore.clip_grad_norm_, 1)
    train(stage, shape, nn.utils.clip_grad_norm_, 2)
    train(
        stage,
        shape,
        zerocore.clip_grad_norm_,
        2,
        communication=zerocore.Communication(accumulate="full", prefetch=2),
    )


@pytest.mark.one_by_day
@pytest.mark.parametrize("shape", SHAPES)
def test_training_is_that_of_one_process(stage: int, shape: str) -> None:
    run_ranks(train_all_ways, 4, stage, SHAPES[shape])


@pytest.mark.one_by_day
def test_replicas_of_data_and_tensor_parallelism(stage: int) -> None:
    run_ranks(train, 8, stage, (2, 2, 2), zerocore.clip_grad_norm_, 1)


def train_after_others(stage: int) -> None:
    """Half of the ranks have sharded a model of their own before."""
    alone = [dist.new_group([rank]) for rank in range(8)]
    if dist.get_rank() < 4:
        zerocore.shard(nn.Linear(2, 2), group=alone[dist.get_rank()])
    train(stage, (2, 2, 2), zerocore.clip_grad_norm_, 1)


@pytest.mark.one_by_day
def test_ranks_of_which_some_have_sharded_before(stage: int) -> None:
    run_ranks(train_after_others, 8, stage, fresh=True)


def recompute(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def freeze(model: nn.Module) -> None:
    model.blocks[0].norm.weight.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)


def leave(model: nn.Module) -> None:
    pass


WAYS: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any]]] = {
    "checkpointing": (recompute, {}),
    "frozen": (freeze, {}),
    "offload": (leave, {"offload": zerocore.Offload("cpu", "cpu", "cpu")}),
    "budget": (
        leave,
        {"memory_budget": "1GB", "communication": zerocore.Communication(sync_buffers=True)},
    ),
}


def train_one_way(way: str) -> None:
    prepare, options = WAYS[way]
    mesh, truth = mesh_of((2, 2)), whole_model()
    model = cut_model(mesh["tp"])
    for each in (model, truth):
        prepare(each)
    zerocore.shard(model, group=mesh["dp"], **options)
    own = zerocore.optim.AdamW(model.parameters(), lr=0.05, clip_grad_norm=0.1)
    plain = torch.optim.AdamW(truth.parameters(), lr=0.05)
    for number in range(3):
        loss_of(model, [mesh["dp"].get_local_rank()], number).backward()
        loss_of(truth, range(2), number).backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        for optimizer in (own, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, truth, rtol=1e-5, atol=2e-6)


@pytest.mark.one_by_day
@pytest.mark.parametrize("way", WAYS)
def test_other_features(way: str) -> None:
    run_ranks(train_one_way, 4, way)


def train_narrow(stage: int) -> None:
    """The replicated parameters' gradients are summed in ``reduce_dtype``, as all others are."""
    mixed = zerocore.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    model, rank, num = sharded((2, 2), stage, mixed_precision=mixed)
    truth = whole_model()
    optimizers = [zerocore.optim.AdamW(each.parameters(), lr=0.01) for each in (model, truth)]
    for number in range(3):
        loss = loss_of(model, [rank], number)
        loss.backward()
        expected = loss_of(truth, range(num), number)
        expected.backward()
        total = loss.detach() / num
        dist.all_reduce(total)
        torch.testing.assert_close(total.float() / 2, expected.detach(), rtol=3e-2, atol=3e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, truth, rtol=0.1, atol=0.05)


@pytest.mark.one_by_day
def test_mixed_precision(stage: int) -> None:
    run_ranks(train_narrow, 4, stage)


def read_weights(stage: int) -> None:
    """A program reads DTensors outside of a call and inside of ``unsharded``, as layers do."""
    model, rank, _ = sharded((2, 2), stage)
    truth = whole_model()
    weight = model.blocks[0].norm.weight
    expected = truth.blocks[0].norm.weight
    assert torch.equal((weight * 1.0).full_tensor(), expected)
    with zerocore.unsharded(model):
        assert torch.equal(model.blocks[0].up.weight.full_tensor(), truth.blocks[0].up.weight)
        assert model.blocks[0].up.weight.placements == (Shard(0),)
    (loss_of(model, [rank], 0) + model.blocks[0].norm.weight.full_tensor().sum()).backward()
    (loss_of(truth, range(2), 0) + truth.blocks[0].norm.weight.sum()).backward()
    for (name, param), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(whole_of(param.grad), whole.grad, msg=name, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, [0], 0), loss_of(truth, [0], 0), **CLOSE)


@pytest.mark.one_by_day
def test_weights_are_read_as_layers_see_them(stage: int) -> None:
    run_ranks(read_weights, 4, stage)


def compare_plan(stage: int, shape: tuple[int, ...]) -> None:
    model, rank, _ = sharded(shape, stage)
    optimizer = torch.optim.AdamW(model.parameters())
    assert_follows_plan(model, optimizer, lambda number: loss_of(model, [rank], number))
    assert (
        zerocore.planning.predict_memory(model).total
        == zerocore.memory_usage(model, optimizer).total
    )


@pytest.mark.one_by_day
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_what_happens(stage: int, shape: str) -> None:
    run_ranks(compare_plan, 4, stage, SHAPES[shape])


def trained(shape: tuple[int, ...], stage: int, steps: int) -> tuple[nn.Module, Any]:
    model, rank, _ = sharded(shape, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(steps):
        loss_of(model, [rank], number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_everywhere(folder: str, shape: tuple[int, ...], stage: int) -> dict[str, Any]:
    model, optimizer = trained(shape, stage, 2)
    zerocore.Checkpoints(f"{folder}/own", model, optimizer).save(2)
    zerocore.save_safetensors(model, f"{folder}/files")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    full = zerocore.full_state_dict(model, rank0_only=False)
    return {"model": full, "states": states}


def load_everywhere(
    folder: str, shape: tuple[int, ...], stage: int, expected: dict[str, Any]
) -> None:
    for way in ("own", "files", "dcp", "full", "full on rank 0"):
        model, optimizer = trained(shape, stage, 1)
        if way == "own":
            assert zerocore.Checkpoints(f"{folder}/own", model, optimizer).load() == 2
            states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
            for index, state in states.items():
                for key, value in state.items():
                    assert torch.equal(value, expected["states"][index][key]), (index, key)
        elif way == "files":
            zerocore.load_safetensors(model, f"{folder}/files", verify=True)
        elif way == "dcp":
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/dcp")
            model.load_state_dict(state["model"])
        else:
            is_source = way == "full" or dist.get_rank() == 0
            first = expected["model"] if is_source else None
            zerocore.load_full_state_dict(model, first, broadcast=way != "full")
        found = zerocore.full_state_dict(model, rank0_only=False)
        for key, value in expected["model"].items():
            assert torch.equal(found[key], value), (way, key)


def load_into_plain(folder: str, expected: dict[str, Any]) -> None:
    """Torch's own reader, and the files of one process."""
    files = load_file(f"{folder}/files/model.safetensors")
    for saved in (sorted(Path(folder, "own").iterdir())[-1], Path(folder, "dcp")):
        state = {"model": whole_model().state_dict()}
        dcp.load(state, checkpoint_id=saved, no_dist=True)
        for key, value in expected["model"].items():
            assert torch.equal(state["model"][key], value), key
            assert torch.equal(files[key], value), key


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("saved", "loaded"), [*by_night(("1x4", "1x4")), ("1x4", "2x2"), ("2x2", "1x4")]
)
def test_checkpoints_go_from_each_mesh_to_another(stage: int, saved: str, loaded: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(save_everywhere, 4, folder, SHAPES[saved], stage)[0]
        load_into_plain(folder, expected)
        run_ranks(load_everywhere, 4, folder, SHAPES[loaded], 3 - stage, expected)


def raise_on_one_rank(stage: int) -> None:
    model, rank, _ = sharded((2, 2), stage)
    loss_of(model, [rank], 0).backward()
    expected = {name: whole_of(param.grad) for name, param in model.named_parameters()}
    model.zero_grad()
    hook = model.last.register_forward_hook(_fail)  # all ranks of tensor parallelism are in step
    with pytest.raises(RuntimeError, match="no more"):
        loss_of(model, [rank], 0).backward()
    hook.remove()
    loss_of(model, [rank], 0).backward()
    for name, param in model.named_parameters():
        assert torch.equal(whole_of(param.grad), expected[name]), name


def _fail(*_: Any) -> None:
    raise RuntimeError("no more")


@pytest.mark.one_by_day
def test_an_exception_leaves_the_model_usable(stage: int) -> None:
    run_ranks(raise_on_one_rank, 4, stage)


def cut_over_all(mesh: DeviceMesh) -> nn.Module:
    return cut_model(mesh._flatten("all"))


def cut_twice(mesh: DeviceMesh) -> nn.Module:
    model = cut_model(mesh["tp"])
    first = distribute_tensor(model.first.weight.detach(), mesh, [Replicate(), Shard(0)])
    model.first.weight = nn.Parameter(first)
    return model


def cut_elsewhere(mesh: DeviceMesh) -> nn.Module:
    model = cut_model(mesh["tp"])
    first = distribute_tensor(model.first.weight.detach(), mesh["dp"], [Shard(0)])
    model.first.weight = nn.Parameter(first)
    return model


def differ_by_part(mesh: DeviceMesh) -> nn.Module:
    model = cut_model(mesh["tp"])
    with torch.no_grad():
        model.first.weight.add_(mesh["tp"].get_local_rank())
    return model


MISTAKES: dict[Callable[[DeviceMesh], nn.Module], str] = {
    cut_over_all: r"are in group=, too; pass the ranks of data parallelism",
    cut_twice: r"parameter 'first.weight' is a DTensor on the 2-D",
    cut_elsewhere: r"DTensors are on several meshes: 'first.weight' over ranks",
    differ_by_part: r"have other values of 'first.weight'",
}


def refuse(make: Callable[[DeviceMesh], nn.Module]) -> str:
    mesh = mesh_of((2, 2))
    with pytest.raises(ValueError, match=MISTAKES[make]):
        zerocore.shard(make(mesh), group=mesh["dp"])
    return ""


@pytest.mark.parametrize("make", MISTAKES)
def test_mistakes_are_named_on_every_rank(make: Callable[[DeviceMesh], nn.Module]) -> None:
    run_ranks(refuse, 4, make)


def differ_everywhere() -> None:
    """A seed that was forgotten: rank 0's values are those of all ranks, as without parts."""
    mesh = mesh_of((1, 4))
    model = zerocore.shard(differ_by_part(mesh), group=mesh["dp"])
    assert torch.equal(model.first.weight.full_tensor(), whole_model().first.weight)


def test_plain_parameters_are_rank_0s() -> None:
    run_ranks(differ_everywhere, 4)


def rows_of_units() -> dict[str, list[str]]:
    model, _, _ = sharded((2, 2), 3)
    return {row[0]: row[-2:] for row in zerocore.describe(model).rows()}


def test_units_by_mesh() -> None:
    rows = run_ranks(rows_of_units, 4)[0]
    assert rows["first"] == ["2", "2"]
    assert rows["blocks.0"] == ["2", "2"]
    assert rows["blocks.0 (replicated)"] == ["2 x 2", "2"]
