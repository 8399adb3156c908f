"""Ordinary scripts give the same under DDP, ``torch.distributed.fsdp`` and ``zerocore.fsdp``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ADAMW, ENGINES, Block, Net, loss_of, make_net, shard_blocks, tokens_of
from zerocore.model.state import state_of

Script = Callable[[list[Any]], list[float]]


def average_and_evaluate(models: list[Any]) -> list[float]:
    """An average of the weights, and evaluation with other shapes in the middle of accumulation."""
    (model,) = models
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    average = [param.detach().clone() for param in model.parameters()]
    seen = []
    for step in range(5):
        for micro in range(2):
            loss = loss_of(model, tokens_of(step, micro)) / 2
            loss.backward()
            seen.append(loss.item())
            if micro == 0:  # after the last one FSDP2's root would show full parameters below
                model.eval()
                with torch.no_grad():
                    seen.append(loss_of(model, tokens_of(step, 7)[:3, :4]).item())
                model.train()
        optimizer.step()
        optimizer.zero_grad()
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.1)
    return seen + sums_of(average)


def student_and_teacher(models: list[Any]) -> list[float]:
    """Two models in one loss; the second one is frozen in turn, and called twice in a step."""
    student, teacher = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen = []
    for step in range(6):
        tokens = tokens_of(step)
        teacher.requires_grad_(step % 2 == 0)
        wanted = teacher(tokens).float().softmax(-1)
        found = student(tokens).float().softmax(-1)
        loss = (found - wanted).square().sum() + loss_of(student, tokens) + loss_of(teacher, tokens)
        loss.backward()
        seen.append(loss.item())
        for optimizer in optimizers[: 2 - step % 2]:
            optimizer.step()
            optimizer.zero_grad()
    return seen + sums_of([param.detach() for model in models for param in model.parameters()])


def sums_of(tensors: list[Tensor]) -> list[float]:
    """Sums of full values."""
    full = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return [value.double().square().sum().item() for value in full]


def compare(script: Script, num_models: int) -> None:
    nets: list[nn.Module] = [make_net() for _ in range(num_models)]
    for net in nets[1:]:
        net.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    ddp = [DistributedDataParallel(copy.deepcopy(net)) for net in nets]
    expected = script(ddp)
    for name, fsdp in ENGINES.items():
        found = script([shard_blocks(fsdp, copy.deepcopy(net)) for net in nets])
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_average_of_weights_and_evaluation_between_micro_batches() -> None:
    run_ranks(compare, 2, average_and_evaluate, 1)


def test_two_models_one_of_which_is_frozen_in_turn() -> None:
    run_ranks(compare, 2, student_and_teacher, 2)


# -- near ranks: gathers after the first one come from two of four ranks ------------------------

NUM_NEAR = 2


class Skipping(Net):
    """Goes past a block when told so."""

    def forward(self, tokens: Tensor, skipped: int | None = None) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == skipped else block(x)
        return self.head(x)


def skip_a_block_on_one_rank(models: list[Any]) -> list[float]:
    """In step 2 rank 1 goes past a block, in a forward and in its backward; in step 3 rank 2."""
    (model,) = models
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(5):
        skipped = 1 if (step, dist.get_rank()) in ((2, 1), (3, 2)) else None
        for micro in range(2):
            loss = model(tokens_of(step, micro), skipped).square().mean()
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen + full_sums(model)


def save_and_resume(folder: Path, models: list[Any]) -> list[float]:
    """The second model, of other weights, goes on with the run of the first one."""
    seen = []
    for part, model in enumerate(models):
        optimizer = ADAMW(model.parameters(), lr=1e-2)
        if part == 1:
            loss_of(model, tokens_of(9)).backward()  # near ranks keep parts of the other weights
            optimizer.zero_grad()
            weights, states = get_state_dict(model, optimizer)
            found = {"model": weights, "optimizer": states}
            dcp.load(found, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        for step in range(3 * part, 3 * part + 3):
            for micro in range(2):
                loss = loss_of(model, tokens_of(step, micro))
                loss.backward()
                seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if part == 0:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return seen + full_sums(models[1])


def full_sums(model: Any) -> list[float]:
    """Sums of full values of a model of any system."""
    if isinstance(next(model.parameters()), zerocore.ShardedParameter):
        return sums_of(list(zerocore.full_state_dict(model, rank0_only=False).values()))
    return sums_of([param.detach() for param in model.parameters()])


def shard_near(net: nn.Module) -> nn.Module:
    return zerocore.shard(
        net, units=[Block], communication=zerocore.Communication(regather=NUM_NEAR)
    )


def compare_near(
    script: Callable[..., list[float]],
    make: Callable[[], nn.Module],
    num_models: int,
    systems: tuple[str, ...],
    folder: Path | None,
) -> None:
    options = {"reshard_after_forward": NUM_NEAR}
    makers: dict[str, Callable[[Any], Any]] = {
        "ddp": partial(DistributedDataParallel, find_unused_parameters=True),
        "zerocore.shard": shard_near,
        **{name: partial(shard_blocks, fsdp, **options) for name, fsdp in ENGINES.items()},
    }
    torch.manual_seed(0)
    nets = [make() for _ in range(num_models)]
    found = {}
    for name in ("ddp", *systems):
        models = [makers[name](copy.deepcopy(net)) for net in nets]
        own = script if folder is None else partial(script, folder / name)
        found[name] = own(models)
        if name.startswith("zerocore"):
            counters = [state_of(model).engine.counters for model in models]
            assert all(each["gather_near"].count > 0 for each in counters), name
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], found["ddp"], rtol=1e-4, atol=1e-5, msg=message)


def test_near_ranks_where_one_rank_skips_a_block() -> None:
    """Without FSDP2, where the other ranks would wait for the one that skips."""
    ours = ("zerocore.shard", "zerocore")
    run_ranks(compare_near, 4, skip_a_block_on_one_rank, Skipping, 1, ours, None)


@pytest.mark.nightly
def test_near_ranks_before_and_after_a_resume(tmp_path: Path) -> None:
    systems = ("torch", "zerocore.shard", "zerocore")
    run_ranks(compare_near, 4, save_and_resume, Net, 2, systems, tmp_path)
