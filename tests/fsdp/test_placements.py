"""Parameters that are cut in other dimensions than the first, or that are DTensors before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.harness import run_ranks
from tests.fsdp.both import Trained, check_same, train, train_both


class Layers(nn.Module):
    """Two pairs of layers that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = x + pair(x)
        return x


def make_layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def make_recomputing() -> nn.Module:
    """The units are wrappers whose inside is computed once more, in the backward."""
    model: Any = make_layers()
    model.pairs = nn.ModuleList(checkpoint_wrapper(pair) for pair in model.pairs)
    return model


def last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.dim() > 1 else None


def step_on(mesh: Any) -> Any:
    """Inputs differ between the ranks of data parallelism only."""

    def step(model: nn.Module, index: int) -> float:
        generator = torch.Generator().manual_seed(100 * index + mesh.get_local_rank())
        loss = model(torch.randn(3, 8, generator=generator)).square().mean()
        loss.backward()
        return loss.item()

    return step


def shard_pairs(fsdp: Any, model: Any, **options: Any) -> Any:
    for pair in model.pairs:
        fsdp.fully_shard(pair, **options)
    return fsdp.fully_shard(model, **options)


def train_columns() -> None:
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def run(fsdp: Any, model: Any, **options: Any) -> Trained:
        shard_pairs(fsdp, model, mesh=mesh, shard_placement_fn=last_dim, **options)
        weight = model.pairs[0][0].weight
        assert weight.placements == (Shard(1),)
        assert tuple(weight.to_local().shape) == (12, 4)
        return train(model, step_on(mesh))

    check_same(train_both(run, make_layers))
    check_same(train_both(run, make_recomputing))
    check_same(train_both(lambda *args: run(*args, reshard_after_forward=False), make_layers))
    check_same(train_both(lambda *args: run(*args, mp_policy=policy), make_layers), 2e-2, 2e-3)


def test_other_dimensions_than_the_first_are_cut_as_fsdp2_does() -> None:
    run_ranks(train_columns, 2, timeout=120)


def train_in_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def run(fsdp: Any, model: Any, **options: Any) -> Trained:
        for pair in model.pairs:
            inside = getattr(pair, "_checkpoint_wrapped_module", pair)
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(inside, mesh["tp"], plan)
        shard_pairs(fsdp, model, mesh=mesh["dp"], **options)
        weight = model.pairs[0][0].weight
        assert weight.device_mesh == mesh
        assert weight.to_local().numel() == 24
        return train(model, step_on(mesh["dp"]))

    for options in ({}, {"reshard_after_forward": False}, {"shard_placement_fn": across_tensor}):
        for make in (make_layers, make_recomputing):
            check_same(train_both(lambda *args, given=options: run(*args, **given), make))


def across_tensor(param: Any) -> Shard | None:
    """The dimension that tensor parallelism leaves whole."""
    cut = [placement.dim for placement in param.placements if isinstance(placement, Shard)]
    return Shard(1 - cut[0]) if param.dim() == 2 and cut else None


def test_tensor_parallel_parameters_are_sharded_as_fsdp2_does() -> None:
    run_ranks(train_in_two_dimensions, 4, timeout=120)
