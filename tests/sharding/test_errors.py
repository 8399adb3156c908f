"""Every mistake is a clear error on every rank, and leaves nothing that hangs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named
from tests.distributed.values import own_of
from tests.zoo_awkward import Net
from tests.zoo_blocks import Block, OuterBlock

MISTAKE = (ValueError, TypeError)


def still_works(stage: int) -> None:
    """The ranks are in step: they can shard and train a model."""
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def shard_twice(stage: int) -> None:
    model = zerocore.shard(Net(), stage=stage)
    with pytest.raises(MISTAKE, match=r"already.*sharded|sharded.*already|twice"):
        zerocore.shard(model, stage=stage)
    part = zerocore.shard(Net().blocks[0], stage=stage)
    with pytest.raises(MISTAKE, match=r"already.*sharded|sharded.*already|twice"):
        zerocore.shard(nn.Sequential(part, Block()), stage=stage)
    still_works(stage)


def test_shard_twice(stage: int) -> None:
    run_ranks(shard_twice, 2, stage)


def give_bad_options() -> None:
    for options, named in (
        ({"stage": 4}, "stage.*4"),
        ({"stage": -1}, "stage.*-1"),
        ({"stage": "3"}, "stage"),
        ({"prefetch": 1}, "unexpected keyword argument 'prefetch'"),
        ({"communication": 1}, "communication must be a zerocore.Communication, got 1"),
        ({"units": 3}, "units must be a list"),
        ({"units": [3]}, "units: expected classes"),
    ):
        with pytest.raises(MISTAKE, match=named):
            zerocore.shard(Net(), **options)  # type: ignore[arg-type]
    with pytest.raises(MISTAKE, match=r"Sequential|Identity|no parameters|nothing to shard"):
        zerocore.shard(nn.Sequential(nn.Identity()))
    with pytest.raises(MISTAKE):
        zerocore.shard([nn.Linear(2, 2)])  # type: ignore[type-var]
    still_works(3)


def test_options_and_nothing_to_shard() -> None:
    run_ranks(give_bad_options, 2)


def choose_bad_units() -> None:
    model = Net()
    nested = Net(OuterBlock)
    for module, units, named in (
        (model, [Block, model.blocks[0]], "blocks.0"),
        (model, ["blocks.1", "blocks.1"], "blocks.1"),
        (model, ["blok"], "blok"),
        (model, [Block()], "Block"),
        (model, [nn.Conv2d], "Conv2d"),
        (nested, [Block, OuterBlock], "blocks.0"),
    ):
        with pytest.raises(MISTAKE, match=named):
            zerocore.shard(module, units=units)
        assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    still_works(3)


def test_units_that_overlap_or_match_nothing() -> None:
    run_ranks(choose_bad_units, 2)


class WiderNet(Net):
    """The last rank's model differs in a shape."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 4 if wide else 5)


def differ(stage: int, kind: str) -> None:
    odd_one = dist.get_rank() == dist.get_world_size() - 1
    model: nn.Module = WiderNet(odd_one) if kind == "shape" else Net()
    if odd_one and kind == "dtype":
        model.get_submodule("blocks.1.linear").double()
    if odd_one and kind == "name":
        model.add_module("late", nn.Linear(2, 2))
    if odd_one and kind == "requires_grad":
        model.get_submodule("blocks.2.norm").requires_grad_(False)
    units = ["blocks.0"] if odd_one and kind == "units" else None
    named = {
        "shape": r"extra.weight.*(?s:.*)(4, 3|5, 3)",
        "dtype": r"blocks.1.linear.weight(?s:.*)float64",
        "name": r"late",
        "requires_grad": r"blocks.2.norm.weight",
        "units": r"unit|blocks",
        "stage": r"stage",
    }[kind]
    own_stage = (stage + 1) % 4 if odd_one and kind == "stage" else stage
    with pytest.raises((ValueError, RuntimeError), match=named):
        zerocore.shard(model, stage=own_stage, units=units)
    still_works(stage)


@pytest.mark.parametrize("kind", ["shape", "dtype", "name", "requires_grad", "units", "stage"])
def test_models_that_differ_between_ranks(kind: str) -> None:
    run_ranks(differ, 3, 3, kind)


def test_models_that_differ_at_every_stage(stage: int) -> None:
    run_ranks(differ, 2, stage, "shape")


def err_on_one_rank(kind: str) -> None:
    erring = dist.get_rank() == 1
    model: nn.Module = Net()
    options: dict[str, Any] = {}
    if erring and kind == "stage":
        options["stage"] = 4
    elif erring and kind == "units":
        options["units"] = ["blok"]
    elif erring and kind == "nothing":
        model = nn.Identity()
    elif kind == "twice":
        zerocore.shard(model)
        model = model if erring else Net()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=None if erring else "rank 1"):
        zerocore.shard(model, **options)
    still_works(3)


@pytest.mark.parametrize("kind", ["stage", "units", "nothing", "twice"])
def test_mistake_of_one_rank_is_an_error_on_all(kind: str) -> None:
    run_ranks(err_on_one_rank, 2, kind)


def copy_model(stage: int) -> None:
    model = zerocore.shard(Net(), stage=stage)
    with pytest.raises((TypeError, RuntimeError), match="full_state_dict"):
        pickle.dumps(model)
    with pytest.raises((TypeError, RuntimeError), match="full_state_dict"):
        pickle.dumps(model.blocks[0])
    with pytest.raises(MISTAKE, match="shard"):
        model.half()


def test_deepcopy_and_conversion(stage: int) -> None:
    run_ranks(copy_model, 2, stage)


CHANGES = ("optimizer", "load", "write_back")


def backward_after_change(stage: int, change: str) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = case.seeded_batch(0, dist.get_rank(), 2)
    case.loss(model, batch).backward()
    loss = case.loss(model, batch)
    _change(model, optimizer, change)
    with pytest.raises(RuntimeError, match=r"chang|modif"):
        loss.backward()
    model.zero_grad()
    zerocore.reset(model)
    saved = case.seeded_build().state_dict() if dist.get_rank() == 0 else {}
    zerocore.load_full_state_dict(model, saved)
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def _change(model: nn.Module, optimizer: torch.optim.Optimizer, change: str) -> None:
    if change == "optimizer":
        optimizer.step()
    elif change == "load":
        saved = Net().state_dict() if dist.get_rank() == 0 else {}
        zerocore.load_full_state_dict(model, saved)
    else:
        with zerocore.unsharded(model, write_back=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


@pytest.mark.parametrize("change", CHANGES)
def test_backward_after_parameters_changed(stage: int, change: str) -> None:
    run_ranks(backward_after_change, 2, stage, change)


def use_unsharded_model() -> None:
    plain: Any = Net()
    for call in (
        lambda: zerocore.describe(plain),
        lambda: zerocore.full_state_dict(plain),
        lambda: zerocore.load_full_state_dict(plain, plain.state_dict()),
        lambda: zerocore.no_sync(plain).__enter__(),
        lambda: zerocore.unsharded(plain).__enter__(),
        lambda: zerocore.reset(plain),
    ):
        with pytest.raises(MISTAKE, match="shard"):
            call()


def test_functions_want_a_sharded_model() -> None:
    run_ranks(use_unsharded_model, 1)


class Reassigning(nn.Module):
    """Gives a parameter data of another shape in its forward; in a block, or by itself."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.block = nn.Linear(4, 4)
        self.where = where

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y: torch.Tensor = self.block(self.block(x) * self.weight) + self.block.bias
        if fails:
            owner: Any = self if self.where == "root" else self.block
            owner.weight.data = torch.ones(3)
        return y


def reassign_on_one_rank(stage: int, where: str) -> None:
    torch.manual_seed(0)
    model: Any = zerocore.shard(Reassigning(where), stage=stage, units=[nn.Linear])
    x = torch.ones(2, 4)
    model(x, False).sum().backward()
    right = [own_of(param.grad).clone() for param in model.parameters()]
    model.zero_grad()
    if dist.get_rank() == 1:
        with pytest.raises((ValueError, RuntimeError), match="weight"):
            model(x, True).sum()
    else:
        out = model(x, False).sum()
        with pytest.raises(RuntimeError, match="rank 1"):
            out.backward()
    model.zero_grad()
    model(x, False).sum().backward()
    found = [own_of(param.grad) for param in model.parameters()]
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("where", ["root", "block"])
def test_data_of_another_shape_on_one_rank(stage: int, where: str) -> None:
    """All ranks hear of it, and the model is usable."""
    run_ranks(reassign_on_one_rank, 2, stage, where)
