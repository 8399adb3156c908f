"""Training with states, gradients and parameters on the host: the bits of training without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named
from tests.distributed.values import own_of
from tests.engine.offloading import (
    ALL,
    BF16,
    BOTH,
    STATES,
    Block,
    Optimizer,
    adamw,
    assert_same_bits,
    backward,
    grouped,
    offloads_of,
    torchs,
)
from tests.zoo_case import Case
from zerocore import Offload

STEPS = 3


def train(
    case: Case,
    stage: int,
    make: Callable[[Iterable[Any]], Optimizer],
    offload: Offload | None,
    *,
    scaler: bool = False,
    clip_by_torch: bool = False,
    sync_every: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Losses, weights and states after some steps."""
    units = list(case.units) if case.units else None
    model = zerocore.shard(
        case.seeded_build(), stage=stage, units=units, offload=offload, **options
    )
    optimizer = make(model.parameters())
    scales = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaler)
    losses = []
    for step in range(STEPS):
        losses.append(accumulate(model, case, step, sync_every))
        if clip_by_torch:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaler:
            scales.scale(torch.zeros(()))  # it wants to have been used
            if step == 1:  # the step changes nothing
                own_of(next(p for p in model.parameters() if p.grad is not None).grad).fill_(inf)
            scales.step(optimizer)
            scales.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        **zerocore.full_state_dict(model, rank0_only=False),
        **{f"{index}.{key}": value for index, of in states.items() for key, value in of.items()},
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"make": adamw},
    "clip, groups": {"make": grouped},
    "clip by torch": {"make": adamw, "clip_by_torch": True},
    "bf16": {"make": adamw, "mixed_precision": BF16},
    "bf16, clip, every reduction": {"make": grouped, "mixed_precision": BF16, "sync_every": True},
    "scaler": {"make": adamw, "scaler": True},
    "torch's AdamW": {"make": torchs},
    "full sums": {"make": adamw, "communication": zerocore.Communication(accumulate="full")},
}


STAGES_OF_RANKS = {1: (0, 3), 2: (0, 1, 2, 3), 3: (1, 3), 4: (2, 3)}


def compare_all() -> None:
    """Each variant with one or two offloads at a stage, in turn; on two ranks all pairs come.

    On other numbers of ranks every other variant, at the two stages the one half and the other.
    """
    case = case_named("plain")
    for place, stage in enumerate(STAGES_OF_RANKS[dist.get_world_size()]):
        for number, (name, variant) in enumerate(VARIANTS.items()):
            if dist.get_world_size() != 2 and number % 2 != place:
                continue
            options = dict(variant)
            run = partial(train, case, stage, options.pop("make"), **options)
            expected = run(None)
            offloads = offloads_of(stage)
            turn = number % len(offloads)
            few = dist.get_world_size() > 2
            for offload in {offloads[turn], offloads[turn if few else -1 - turn]}:
                what = f"stage {stage}, {name}, {offload}"
                print(what, flush=True)
                assert_same_bits(run(offload), expected, what)


@pytest.mark.one_by_day
def test_bits_are_those_of_no_offload(world_size: int) -> None:
    run_ranks(compare_all, world_size, timeout=300.0)


def frozen(case: Case) -> Case:
    """All but every third parameter is frozen, as under adapters."""

    def build() -> nn.Module:
        model = case.build()
        for index, param in enumerate(model.parameters()):
            param.requires_grad_(index % 3 == 0)
        return model

    return Case(case.name, build, case.make_batch, case.loss, case.units)


def compare_others() -> None:
    """Replicas of shards, frozen parameters, dtypes, tied and unused parameters.

    In turn with everything on the host, and with one of the other offloads.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    runs = {
        "hybrid": (case_named("plain"), {"group": mesh}),
        "hybrid, bf16": (case_named("plain"), {"group": mesh, "mixed_precision": BF16}),
        "frozen": (frozen(case_named("plain")), {}),
        "frozen, bf16": (frozen(case_named("plain")), {"mixed_precision": BF16}),
        **{name: (case_named(name), {}) for name in ("mixed_dtypes", "tied", "empty_shards")},
    }
    others = ((0, STATES), (2, BOTH), (3, STATES))
    for number, (name, (case, options)) in enumerate(runs.items()):
        stage, offload = (3, ALL) if number % 2 else others[number // 2 % 3]
        run = partial(train, case, stage, grouped, **options)
        assert_same_bits(run(offload), run(None), f"{name}, stage {stage}, {offload}")


@pytest.mark.nightly
def test_bits_of_other_models_and_meshes() -> None:
    run_ranks(compare_others, 4, timeout=300.0)


class Clamped(Block):
    """Changes its weights in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def trained_blocks(kind: str, stage: int, offload: Offload | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Clamped() if kind == "clamped" else Block() for _ in range(3)))
    if kind == "checkpointed":
        model = nn.Sequential(*map(Checkpointed, model))
    model = zerocore.shard(model, stage=stage, units=[Block], offload=offload)
    if kind == "compiled":
        for block in model:
            block.compile(backend="eager")
    optimizer = adamw(model.parameters(), clip_grad_norm=1.0)
    losses = []
    for _ in range(3):
        losses.append(backward(model))
        optimizer.step()
        optimizer.zero_grad()
    full: dict[str, torch.Tensor] = zerocore.full_state_dict(model, rank0_only=False)
    return {"losses": torch.stack(losses), **full}


def compare_blocks() -> None:
    for kind in ("clamped", "checkpointed", "compiled"):
        for stage, offload in ((0, STATES), (2, STATES), (3, ALL)):
            expected = trained_blocks(kind, stage, None)
            assert_same_bits(trained_blocks(kind, stage, offload), expected, f"{kind}, {stage}")


@pytest.mark.nightly
def test_bits_of_changed_checkpointed_and_compiled_blocks() -> None:
    run_ranks(compare_blocks, 2, timeout=120.0)
