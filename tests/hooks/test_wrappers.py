"""Wrappers of a sharded model, and new places for its parameters, are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named


def replicate(model: nn.Module) -> Any:
    from torch.distributed._composable import replicate as apply

    return apply(model)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sync_module_states=True
    ),
    "fully_shard": fully_shard,
    "fully_shard|DistributedDataParallel": replicate,
}


def wrap() -> None:
    for stage in range(4):
        case = case_named("plain")
        model = zerocore.shard(case.seeded_build(), stage=stage)
        for name, wrapper in WRAPPERS.items():
            for whole in (model, model.get_submodule("blocks.0")):
                with pytest.raises(TypeError, match=f"({name}) around a sharded .*[Ll]eave"):
                    wrapper(whole)
        with pytest.raises(TypeError, match="fully_shard around a sharded Linear"):
            fully_shard(model.get_submodule("blocks.0.linear"))
        accumulate(model, case, 0)
        assert_gradients(model, case, 0)  # nothing was changed
    for wrapper in (fully_shard, WRAPPERS["FullyShardedDataParallel"]):
        with pytest.raises(TypeError, match="around a sharded"):
            wrapper(nn.Sequential(zerocore.shard(nn.Linear(8, 8)), nn.Linear(8, 8)))


def test_wrappers_of_a_sharded_model() -> None:
    run_ranks(wrap, 2)


def prepare() -> None:
    from accelerate import Accelerator

    model = zerocore.shard(nn.Linear(4, 4))
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    with pytest.raises(TypeError, match="DistributedDataParallel around a sharded Linear"):
        accelerator.prepare(model)


def test_accelerate_prepare() -> None:
    pytest.importorskip("accelerate")
    run_ranks(prepare, 2, launch="torchrun")


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", Double()),
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "tie": lambda m: nn.Linear(2, 2).register_parameter("tied", m.weight),
    "list": lambda m: nn.ParameterList(m.parameters()),
}


def change_places() -> None:
    for stage in (0, 3):
        outside = ("tie", "list")  # of plain parameters other modules may be made
        allowed = ("old spectral_norm", *(outside if stage == 0 else ()))  # renames the parameter
        for change in (c for name, c in CHANGES.items() if name not in allowed):
            model = zerocore.shard(case_named("plain").seeded_build(), stage=stage)
            with pytest.raises(ValueError, match=r"blocks\.0\.linear\.\w+'.*[Cc]omplete|Tie"):
                change(model.get_submodule("blocks.0.linear"))


def test_parametrizations_after_shard() -> None:
    run_ranks(change_places, 2)


REMOVALS: dict[str, Callable[[nn.Module], Any]] = {
    "parametrize": lambda m: parametrize.remove_parametrizations(m, "weight"),
    "weight_norm": lambda m: parametrize.remove_parametrizations(m, "weight"),
    "old weight_norm": nn.utils.remove_weight_norm,
    "spectral_norm": lambda m: parametrize.remove_parametrizations(m, "weight"),
    "old spectral_norm": nn.utils.remove_spectral_norm,
}


def remove_parametrizations() -> None:
    """Of modules that are units, and of modules in a unit."""
    for name, remove in REMOVALS.items():
        for units in (["Linear"], []):
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            CHANGES[name](model[1])
            zerocore.shard(model, units=units)
            with pytest.raises(ValueError, match=r"'1\.weight' cannot be removed.*full_state_dict"):
                remove(model[1])


def test_parametrizations_are_not_removed_after_shard() -> None:
    run_ranks(remove_parametrizations, 2)


def prunes(stage: int) -> None:
    """Pruning keeps the parameter under another name; removing it gives the name back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = case_named("plain")
    plain = case.seeded_build()
    model = zerocore.shard(case.seeded_build(), stage=stage)
    pairs = ((model, range(rank, rank + 1)), (plain, range(size)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each, _ in pairs]

    def step() -> None:
        for (each, ranks), optimizer in zip(pairs, optimizers, strict=True):
            for other in ranks:
                loss = case.loss(each, case.seeded_batch(0, other, 4))
                (loss / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def same() -> None:
        found = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(found, dict(plain.state_dict()))

    step()
    for each, _ in pairs:
        torch.manual_seed(0)
        prune.l1_unstructured(each.get_submodule("blocks.0.linear"), "weight", 0.5)
        prune.random_structured(each.get_submodule("blocks.1.linear"), "weight", 0.3, dim=0)
    step()
    step()
    same()
    for each, _ in pairs:
        prune.remove(each.get_submodule("blocks.0.linear"), "weight")
    step()
    same()


def test_pruning_after_shard(stage: int) -> None:
    run_ranks(prunes, 2, stage)
