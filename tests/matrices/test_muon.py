"""zerocore.matrices.Muon: the bits of torch.optim.Muon in one process, at every stage."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from tests.matrices.whole_matrices import (
    Block,
    OneProcess,
    assert_equal,
    full_parameters,
    in_small_rounds,
    is_for_muon,
    make_muon,
    seeded_model,
    train_by_torch,
    train_sharded,
)

STAGES = (0, 1, 2, 3)
MIXED = zerocore.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.01, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "ns_steps": 3},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
]


@in_small_rounds
def train_all(cases: list[tuple[dict[str, Any], tuple[int, ...]]]) -> None:
    for options, stages in cases:
        expected = train_by_torch(3, **options)
        for stage in stages:
            print(stage, options, flush=True)
            model, optimizer = train_sharded(partial(make_muon, **options), 3, stage=stage)
            assert_equal(full_parameters(model), expected)
            assert optimizer.describe().num_rounds >= 4


def test_steps_are_those_of_one_process(world_size: int) -> None:
    run_ranks(train_all, world_size, [(OPTIONS[0], STAGES)])


def test_options_are_torchs() -> None:
    run_ranks(train_all, 2, [(options, (3,)) for options in OPTIONS[1:]])


@in_small_rounds
def train_hybrid() -> None:
    expected = train_by_torch(3, lr=0.02)
    for stage in (0, 1, 3):
        for shape in ((2, 2), (4, 1)):
            print(stage, shape, flush=True)
            mesh = init_device_mesh("cpu", shape)
            model, optimizer = train_sharded(
                partial(make_muon, lr=0.02), 3, stage=stage, group=mesh
            )
            assert_equal(full_parameters(model), expected)
            assert max(optimizer.describe().work) < 0.5  # one matrix is a third of it


def test_hybrid_sharding_divides_the_work_over_all_ranks() -> None:
    run_ranks(train_hybrid, 4)


# The loop around a step: (options of shard, options of Muon, micro-batches)
LOOPS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"stage": 3}, {}, 4),
    ({"stage": 2, "communication": zerocore.Communication(accumulate="full")}, {}, 4),
    ({"stage": 1}, {"clip_grad_norm": 0.1}, 1),
    ({"stage": 3, "mixed_precision": MIXED}, {"clip_grad_norm": 1e9}, 2),
    ({"stage": 0, "mixed_precision": MIXED}, {}, 1),
]


def train_in_loops() -> None:
    for shard_options, options, num_micro_batches in LOOPS:
        print(shard_options, options, flush=True)
        model = zerocore.shard(seeded_model(), units=[Block], **shard_options)
        optimizer = make_muon(model, lr=0.02, **options)
        alone = OneProcess(lr=0.02)
        for step in range(3):
            backward(model, step, num_micro_batches)
            copy_gradients(model, alone)
            optimizer.step()
            clip(alone, options.get("clip_grad_norm"), optimizer.grad_norm)
            alone.step()
            optimizer.zero_grad()
            assert_same(full_parameters(model), alone.parameters())
        for param in model.parameters():
            if param.model_weight is not None:
                assert torch.equal(param.model_weight, param.local().to(torch.bfloat16))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Matrices bit for bit. AdamW clips in its pass, which rounds less often than a pass before."""
    del expected["frozen"]  # in mixed precision of another dtype
    assert_equal(actual, {name: t for name, t in expected.items() if is_for_muon(name, t)})
    others = {name: t for name, t in expected.items() if not is_for_muon(name, t)}
    found = {name: actual[name] for name in others}
    torch.testing.assert_close(found, others, rtol=0, atol=1e-6)


def backward(model: nn.Module, step: int, num_micro_batches: int) -> None:
    for index in range(num_micro_batches):
        generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
        tokens = torch.randint(10, (6,), generator=generator)
        with nullcontext() if index == num_micro_batches - 1 else zerocore.no_sync(model):
            (model(tokens) / num_micro_batches).backward()


def copy_gradients(model: nn.Module, alone: OneProcess) -> None:
    """The one process gets the averaged gradients that the ranks have."""
    own = dict(alone.model.named_parameters())
    for name, param in model.named_parameters():
        own[name].grad = None if param.grad is None else param.grad.full_tensor()


def clip(alone: OneProcess, bound: float | None, norm: Tensor | None) -> None:
    if bound is None or norm is None:
        return
    grads = [p.grad for p in alone.model.parameters() if p.grad is not None]
    own = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    torch.testing.assert_close(norm, own.float())
    factor = (bound / (own + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


def test_accumulation_clipping_and_mixed_precision() -> None:
    run_ranks(train_in_loops, 2)


def skip_bad_steps() -> None:
    """By a GradScaler, and by a norm that is not finite: nothing changes, no state either."""
    for stage in STAGES:
        model = zerocore.shard(seeded_model(), units=[Block], stage=stage)
        optimizer = make_muon(model, lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            before = full_parameters(model)
            loss = model(torch.arange(6)) * (float("inf") if step % 2 else 1.0)
            if step < 2:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.clip_grad_norm = 1.0
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            same = [
                torch.equal(value, before[name]) for name, value in full_parameters(model).items()
            ]
            assert all(same) if step % 2 else sum(same) <= 3, step
        assert scaler.get_scale() == 32.0
        assert optimizer.grad_norm is not None and not optimizer.grad_norm.isfinite()


def test_steps_that_are_not_finite() -> None:
    run_ranks(skip_bad_steps, 2)
