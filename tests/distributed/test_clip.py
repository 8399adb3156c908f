"""Gradient clipping uses the global norm, equal on every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named, full_gradients, reference_gradients

CLIPS = {"torch": torch.nn.utils.clip_grad_norm_, "zerocore": zerocore.clip_grad_norm_}
CASES = ("scalars", "empty_shards", "frozen", "tied", "mixed_dtypes")


def clip(stage: int, function: str, norm_type: float) -> list[float]:
    norms = []
    for name in CASES:
        case = case_named(name)
        model = zerocore.shard(case.seeded_build(), stage=stage)
        accumulate(model, case, 0)
        expected = reference_gradients(case, dist.get_world_size())
        unclipped = _total_norm(expected, norm_type)
        norm = CLIPS[function](model.parameters(), 0.5 * unclipped, norm_type)
        assert norm.dim() == 0
        torch.testing.assert_close(norm.item(), unclipped, rtol=1e-5, atol=0.0)
        halved = {name: 0.5 * gradient for name, gradient in expected.items()}
        torch.testing.assert_close(full_gradients(model), halved, rtol=1e-4, atol=1e-6)
        norms.append(norm.item())
    return norms


def _total_norm(gradients: dict[str, Tensor], norm_type: float) -> float:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients.values()])
    return float(torch.linalg.vector_norm(flat, norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("function", CLIPS)
def test_clip(stage: int, function: str, norm_type: float) -> None:
    answers = run_ranks(clip, 3, stage, function, norm_type)
    assert answers[1:] == answers[:-1]


def clip_variants(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    expected = reference_gradients(case, dist.get_world_size())
    huge = 1e6
    of_model = zerocore.clip_grad_norm_(model, huge).item()
    assert of_model == pytest.approx(_total_norm(expected, 2.0), rel=1e-5)
    parameter = dict(model.named_parameters())["head.weight"]
    of_one = torch.nn.utils.clip_grad_norm_(parameter, huge).item()
    assert of_one == pytest.approx(_total_norm({"": expected["head.weight"]}, 2.0), rel=1e-5)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for foreach in (True, False):
        total = torch.nn.utils.get_total_norm(gradients, foreach=foreach).item()
        assert total == pytest.approx(of_model, rel=1e-6)
    torch.testing.assert_close(full_gradients(model), expected, rtol=1e-5, atol=1e-6)


def test_clip_models_and_single_parameters(stage: int) -> None:
    run_ranks(clip_variants, 2, stage)


REDUCING = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "std": torch.std,
    "dot": lambda gradient: torch.dot(gradient, gradient),
}


def reduce_locally(stage: int, function: str) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    gradient = dict(model.named_parameters())["blocks.0.linear.weight"].grad
    assert gradient is not None
    with pytest.raises(TypeError, match="this rank's elements"):
        REDUCING[function](gradient)


@pytest.mark.parametrize("function", REDUCING)
@pytest.mark.parametrize("sharded_stage", [1, 3])
def test_what_would_be_silently_local_raises(sharded_stage: int, function: str) -> None:
    run_ranks(reduce_locally, 2, sharded_stage, function)
