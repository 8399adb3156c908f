"""Ordinary scripts give the same with offload as under DDP and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks
from tests.engine.offloading import ALL, ALL_ON_DISK, adamw, torchs
from tests.fsdp.both import ENGINES, loss_of, make_net, shard_blocks, tokens_of

Make = Callable[[], tuple[Any, Any]]  # a model and its optimizer, always with the same weights
Script = Callable[[Make, Path], list[float]]


def systems() -> dict[str, Make]:
    """DDP, whose numbers are expected; FSDP2; zerocore with all states on the host or on a disk."""
    net = make_net()

    def ours(**options: Any) -> Make:
        return lambda: with_optimizer(zerocore.shard(copy.deepcopy(net), **options), adamw)

    def with_optimizer(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer(model.parameters())

    return {
        "ddp": lambda: with_optimizer(DistributedDataParallel(copy.deepcopy(net)), torchs),
        "fsdp2": lambda: with_optimizer(shard_blocks(ENGINES["torch"], copy.deepcopy(net)), torchs),
        "host": ours(offload=ALL),
        "disk": ours(offload=ALL_ON_DISK),
    }


def step(model: Any, optimizer: Any, index: int) -> float:
    loss = loss_of(model, tokens_of(index))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def swap_average(make: Make, folder: Path) -> list[float]:
    """An average of the weights takes their place for each evaluation, and gives it back."""
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    params = list(model.parameters())
    average = [param.detach().clone() for param in params]
    seen = []
    for index in range(6):
        loss = loss_of(model, tokens_of(index))
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)]
        with torch.no_grad():
            for mean, param in zip(average, params, strict=True):
                mean.lerp_(param.detach(), 0.3)
            kept = [param.detach().clone() for param in params]
            for param, mean in zip(params, average, strict=True):
                param.copy_(mean)
            model.eval()
            seen.append(loss_of(model, tokens_of(index, 7)).item())
            model.train()
            if hasattr(model, "reshard"):  # FSDP2's root would compute with the average below
                model.reshard()
            for param, before in zip(params, kept, strict=True):
                param.copy_(before)
    return seen


def resume_with_dcp(make: Make, folder: Path) -> list[float]:
    """Saves by torch's own functions, goes on, and begins again from there in a new model."""
    model, optimizer = make()
    seen = [step(model, optimizer, index) for index in range(3)]
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    seen += [step(model, optimizer, index) for index in range(3, 5)]
    model, optimizer = make()
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    again = [step(model, optimizer, index) for index in range(3, 6)]
    assert again[:2] == seen[3:]
    return seen + again


def evaluate(model: Any) -> float:
    """The mean over the ranks, which all decide by."""
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, tokens_of(7, 7))
    dist.all_reduce(loss)
    model.train()
    return loss.item() / dist.get_world_size()


def go_back_to_the_best(make: Make, folder: Path) -> list[float]:
    """The weights that did best in evaluations come back when a learning rate was too high."""
    model, optimizer = make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    seen, best = [evaluate(model)], copy.deepcopy(model.state_dict())
    for index in range(6):
        for group in optimizer.param_groups:
            group["lr"] *= 30 if index == 3 else 1
        seen += [step(model, optimizer, index), evaluate(model)]
        plateau.step(seen[-1])
        if seen[-1] <= min(seen[:1] + seen[2::2]):
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return [*seen, evaluate(model), step(model, optimizer, 6), evaluate(model)]


def look_for_a_learning_rate(make: Make, folder: Path) -> list[float]:
    """Steps at rising learning rates before the training, which begins as if they had not been."""
    model, optimizer = make()
    seen = [step(model, optimizer, 0)]
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for index in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"] *= 3
        seen.append(step(model, optimizer, index))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return seen + [step(model, optimizer, index) for index in range(1, 4)]


def compare(script: Script, folder: Path) -> None:
    found = {}
    for name, make in systems().items():
        found[name] = script(make, folder / name)
        dist.barrier()
    for name, values in found.items():
        torch.testing.assert_close(
            values,
            found["ddp"],
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_an_average_of_weights_is_swapped_in(tmp_path: Path) -> None:
    run_ranks(compare, 2, swap_average, tmp_path)


def test_torchs_own_checkpoint_is_resumed(tmp_path: Path) -> None:
    run_ranks(compare, 2, resume_with_dcp, tmp_path)


@pytest.mark.one_by_day
@pytest.mark.parametrize("script", [go_back_to_the_best, look_for_a_learning_rate])
def test_weights_and_states_come_back(script: Script, tmp_path: Path) -> None:
    run_ranks(compare, 2, script, tmp_path)
