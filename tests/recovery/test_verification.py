"""zerocore.verify: flipped bits are named with their ranks, and what is right is left alone."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.checkpoint.saved_nets import trained
from tests.distributed.harness import run_ranks
from tests.sharding.experts import loss_of
from tests.sharding.test_experts import LAYOUTS, sharded
from zerocore.tensor.rows import elements_of


def flip(values: Tensor, rank: int) -> None:
    """One bit of the first element on one rank, which no version counter sees."""
    if dist.get_rank() == rank:
        ctypes.c_uint8.from_address(values.data_ptr()).value ^= 1


def verified(model: nn.Module, optimizer: Any) -> list[str]:
    """The text of what is wrong, the same on all ranks."""
    found = zerocore.verify(model, optimizer)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, (found.differing, found.changed))
    assert all(each == texts[0] for each in texts)
    lines = str(found).splitlines()
    assert found.is_good == (len(lines) == 2)
    return lines[2:]


def moment(optimizer: Any, param: Any) -> Tensor:
    return elements_of(optimizer.state[param]["exp_avg"], param)


def find_flips(stage: int, name: str, hybrid: bool) -> None:
    options: dict[str, Any] = {}
    if hybrid:
        options["group"] = init_device_mesh("cpu", (2, 2))
    model, optimizer = trained(stage, name, **options)
    assert verified(model, optimizer) == []
    cube = dict(model.named_parameters())["cube"]
    flip(elements_of(cube, cube), 1)
    flip(moment(optimizer, cube), 1)
    torch.manual_seed(0)
    model(torch.randn(4, 4, 3, 3)).square().mean().backward()  # what gathers is as before
    lines = verified(model, optimizer)
    others = "0, 2, 3" if stage == 0 else "3"
    expected = [
        f"{what} changed on rank 1: nothing wrote it" for what in ("'cube'", "'cube': exp_avg")
    ]
    if stage == 0 or hybrid:
        apart = f"ranks {others}; ranks 1" if stage == 0 else f"ranks 1; ranks {others}"
        differing = [f"{what} is not the same on {apart}" for what in ("'cube'", "'cube': exp_avg")]
        expected = [*differing, *expected]
    assert [line for line in lines if "in full" not in line] == expected, lines
    assert [line for line in verified(model, optimizer) if "nothing wrote" in line] == []
    optimizer.step()
    assert [line for line in verified(model, optimizer) if "nothing wrote" in line] == []


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("stage", "name"), [(0, "adamw"), (2, "zerocore"), (3, "zerocore")])
def test_flipped_bits_are_named(stage: int, name: str, hybrid: bool) -> None:
    run_ranks(find_flips, 4, stage, name, hybrid)


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {
        "mixed_precision": zerocore.MixedPrecision(
            torch.bfloat16, torch.float32, keep_fp32=("norm",)
        )
    },
    "host": {"offload": zerocore.Offload(states="cpu", gradients="cpu", parameters="cpu")},
}


def find_elsewhere(name: str) -> None:
    """Main weights, states on the host, averages; nothing is wrong, then one bit is."""
    model, optimizer = trained(3, "zerocore", **OPTIONS[name])
    average = zerocore.weights.EMA(model.parameters())
    both = [optimizer, average]
    for step in range(2):
        assert verified(model, both) == [], step
        torch.manual_seed(step)
        model(torch.randn(4, 4, 3, 3)).square().mean().backward()
        optimizer.step()
        average.update()
    assert verified(model, both) == []
    average.update()
    assert verified(model, both) == []
    cube = dict(model.named_parameters())["cube"]
    flip(elements_of(average.state[cube]["weights_average"], cube), 0)
    assert verified(model, both) == ["'cube': weights_average changed on rank 0: nothing wrote it"]


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_other_parts_of_the_state(name: str) -> None:
    run_ranks(find_elsewhere, 2, name)


def find_in_a_frozen_copy() -> None:
    """Stages 1 and 2 gather what has changed alone, so a full copy lives as long as the model."""
    model, optimizer = trained(2)
    weight = dict(model.named_parameters())["frozen"]
    with zerocore.unsharded(model):
        address = weight.data_ptr() + 4 * 6  # an element of the second rank's shard
    if dist.get_rank() == 0:
        ctypes.c_uint8.from_address(address).value ^= 1
    lines = verified(model, optimizer)
    assert lines == ["'frozen' in full is not the same on ranks 0; ranks 1"], lines


def test_a_full_copy_that_stays() -> None:
    run_ranks(find_in_a_frozen_copy, 2)


def find_of_experts() -> None:
    """Two ranks hold the same experts, and all ranks share the rest."""
    model = sharded(*LAYOUTS["2x2"], 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(2):
        loss_of(model, [dist.get_rank()], number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert verified(model, optimizer) == []
    if dist.get_rank() == 3:
        optimizer.param_groups[0]["lr"] = 0.04
    expected = ["options of group 0 of optimizer 0 is not the same on ranks 0, 1, 2; ranks 3"]
    assert verified(model, optimizer) == expected


def test_experts_and_options() -> None:
    run_ranks(find_of_experts, 4)


def find_in_rows() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    for module in (*model, model):
        zerocore.fsdp.fully_shard(module, mesh=mesh)
    optimizer = zerocore.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert verified(model, optimizer) == []
    weight = model[0].weight
    flip(elements_of(weight, weight), 2)
    assert verified(model, optimizer) == [
        "'0.weight' is not the same on ranks 0; ranks 2",
        "'0.weight' changed on rank 2: nothing wrote it",
    ]


def test_rows() -> None:
    run_ranks(find_in_rows, 4)


def find_alone() -> None:
    model, optimizer = trained(3)
    assert zerocore.verify(model, optimizer).is_good
    with pytest.raises(ValueError, match="not sharded"):
        zerocore.verify(nn.Linear(2, 2))


def test_one_rank() -> None:
    run_ranks(find_alone, 1)


def look_alike() -> None:
    """Learning rates that print alike, and states that were loaded: neither is corruption."""
    model, optimizer = trained(3, "adamw")
    assert verified(model, optimizer) == []
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
    optimizer.load_state_dict(saved)
    assert verified(model, optimizer) == []
    group = optimizer.param_groups[0]
    group["schedule"] = lambda: None  # has another address on each rank
    group["lr"] = torch.tensor(0.05 + 1e-7 * dist.get_rank())
    expected = "options of group 0 of optimizer 0 is not the same on ranks 0; ranks 1"
    assert verified(model, optimizer) == [expected]


def test_values_that_only_look_wrong_or_right() -> None:
    run_ranks(look_alike, 2)
