"""zerocore.optim.AdamW on shards: torch's numbers, states both ways, clipping, GradScaler."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.collectives import count_collectives
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    MakeOptimizer,
    Optimizer,
    Trained,
    accumulate,
    assert_same_training,
    case_named,
    compare_with_one_process,
    train_reference,
    train_sharded,
)
from tests.distributed.values import own_of
from zerocore.optim import AdamW
from zerocore.tensor.rows import shard_of

CASES = ("scalars", "empty_shards", "mixed_dtypes")
OPTIONS = {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}  # see training.adamw
STAGES = (0, 1, 2, 3)


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [
        {"params": listed[::2], "lr": 1e-3, "betas": (0.8, 0.95)},
        {"params": listed[1::2], "weight_decay": 0.3},
    ]


def scheduled(make: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Several groups, and a schedule that moves on after each step."""
    optimizer: Optimizer = make(groups_of(parameters), **OPTIONS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def simple(make: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    optimizer: Optimizer = make(parameters, **OPTIONS)
    return optimizer


def without_decay(make: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Biases and norms do not decay: docs/optimizer.md, for sharded and for plain parameters."""
    matrices, others = [], []
    for param in parameters:
        (matrices if param.ndim >= 2 else others).append(param)
    assert matrices and others
    optimizer: Optimizer = make(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}], **OPTIONS
    )
    return optimizer


def train_all() -> None:
    """Training with zerocore's AdamW equals that of one process with torch's.

    At stage 3 always; at the others on every other number of ranks.
    """
    runs = [(name, simple) for name in CASES]
    for number, (name, make) in enumerate([*runs, ("plain", scheduled), ("plain", without_decay)]):
        ours, torchs = partial(make, AdamW), partial(make, torch.optim.AdamW)
        for stage in STAGES:
            if stage == 3 or (stage + number + dist.get_world_size()) % 2:
                compare_with_one_process(name, stage, ours, torchs)


def test_training_is_that_of_one_process(world_size: int) -> None:
    run_ranks(train_all, world_size, timeout=120.0)


def built(name: str, stage: int, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    case = case_named(name)
    model = zerocore.shard(case.seeded_build(), stage=stage, units=list(case.units or []) or None)
    return model, make(model.parameters())


def states_both_ways() -> None:
    case = case_named("plain")
    for stage in STAGES:
        own, optimizer = built("plain", stage, partial(AdamW, **OPTIONS))
        other, expected = built("plain", stage, partial(torch.optim.AdamW, fused=True, **OPTIONS))
        for step in range(6):
            if step == 2:
                optimizer.load_state_dict(expected.state_dict())  # copies
            if step == 4:
                expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not
            for model, opt in ((own, optimizer), (other, expected)):
                accumulate(model, case, step)
                opt.step()
                opt.zero_grad()
        for a, b in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=1e-6)
            assert optimizer.state[a]["exp_avg"].shape == a.shape
            assert own_of(optimizer.state[a]["exp_avg"]).shape == own_of(a).shape
        assert_flat(optimizer)


def assert_flat(optimizer: Optimizer) -> None:
    """One allocation for each unit and dtype."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name in ("exp_avg", "exp_avg_sq"):
        storages: dict[Any, set[int]] = {}
        for param in params:
            storage = own_of(optimizer.state[param][name]).untyped_storage()
            if storage.nbytes() > 0:
                unit: Any = shard_of(param)
                storages.setdefault((unit.unit, param.dtype), set()).add(storage.data_ptr())
        assert all(len(found) == 1 for found in storages.values())
        assert len(set().union(*storages.values())) == len(storages) > 1


def test_states_go_to_torch_and_back() -> None:
    run_ranks(states_both_ways, 2)


def clip_at_all_stages() -> None:
    """As torch's clip and step of one process; a plain parameter counts once, not on every rank."""
    case, world_size = case_named("plain"), dist.get_world_size()

    def clipped(make: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
        extra = nn.Parameter(torch.full((3,), 2.0))
        extra.grad = torch.ones(3)
        optimizer: Optimizer = make([*parameters, extra], **OPTIONS)
        if make is AdamW:
            optimizer.clip_grad_norm = 0.5
            step = optimizer.step
            optimizer.step = lambda: counts.append(count_collectives(step))  # type: ignore
        else:
            optimizer.register_step_pre_hook(lambda opt, *_: clip(opt))
        optimizer.register_step_post_hook(lambda *_: seen.append(norm_of(optimizer)))
        return optimizer

    def clip(optimizer: Optimizer) -> None:
        params = optimizer.param_groups[0]["params"]
        norms[:] = [nn.utils.clip_grad_norm_(params, 0.5)]

    def norm_of(optimizer: Optimizer) -> Tensor:
        return optimizer.grad_norm if isinstance(optimizer, AdamW) else norms[0]

    norms: list[Tensor] = []
    seen: list[Tensor] = []
    counts: list[list[int]] = []
    expected = train_reference(case, world_size, partial(clipped, torch.optim.AdamW))
    wanted, seen = seen, []
    for stage in STAGES:
        seen.clear()
        actual = train_sharded(case, stage, partial(clipped, AdamW))
        torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=0)
        assert counts == [[1] if stage else []] * len(counts)  # one number
        counts.clear()
        state = expected.state if dist.get_rank() == 0 else {}
        assert_same_training([actual], Trained([expected.losses[dist.get_rank()]], state))


def test_clipping() -> None:
    run_ranks(clip_at_all_stages, 3)


def scale_at_all_stages() -> None:
    """Gradients that are not finite make a step that changes nothing and counts for nothing."""
    for stage in STAGES:
        model = zerocore.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), stage=stage)
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            before = [param.detach().clone() for param in model.parameters()]
            loss = model(torch.ones(1, 4)).sum() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            pairs = zip(model.parameters(), before, strict=True)
            assert all(torch.equal(*pair) for pair in pairs) == (step == 1)
        assert scaler.get_scale() == 32.0
        assert all(optimizer.state[param]["step"] == 2 for param in model.parameters())


def test_grad_scaler() -> None:
    run_ranks(scale_at_all_stages, 2)


def train_mixed(
    stage: int, mixed: zerocore.MixedPrecision, make: Any
) -> tuple[list[float], nn.Module]:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage, mixed_precision=mixed)
    optimizer = simple(make, model.parameters())
    losses = []
    for step in range(4):
        losses.append(accumulate(model, case, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def mix_at_all_stages() -> None:
    """Main and model weights are those of torch's step and the engine's cast."""
    half, full = torch.bfloat16, torch.float32
    for stage in STAGES:
        for mixed in (
            zerocore.MixedPrecision(param_dtype=half, output_dtype=full),
            zerocore.MixedPrecision(param_dtype=half, output_dtype=full, grad_dtype=half),
            zerocore.MixedPrecision(param_dtype=full, main_dtype=half),
        ):
            print(stage, mixed, flush=True)
            # Torch's own step takes only gradients of the weights' dtype.
            like = dataclasses.replace(mixed, grad_dtype=None)
            expected, other = train_mixed(stage, like, partial(torch.optim.AdamW, fused=True))
            losses, model = train_mixed(stage, mixed, AdamW)
            torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=0.0, atol=5e-3)
                assert torch.equal(a.model_weight, a.local().to(mixed.param_dtype))


def test_mixed_precision() -> None:
    run_ranks(mix_at_all_stages, 2)
