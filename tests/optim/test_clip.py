"""Gradient clipping uses the global norm, equal on every rank."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.collectives import count_collectives
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named, full_gradients, reference_gradients
from tests.distributed.values import own_of

CLIPS = {"torch": torch.nn.utils.clip_grad_norm_, "zerocore": zerocore.clip_grad_norm_}
NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
CASES = ("scalars", "empty_shards", "frozen", "tied", "mixed_dtypes")


def clip(stage: int) -> list[float]:
    """Of the two functions each norm has one, and the other one in the next case and stage."""
    norms = []
    for number, name in enumerate(CASES):
        case = case_named(name)
        model = zerocore.shard(case.seeded_build(), stage=stage)
        accumulate(model, case, 0)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        before = [own_of(gradient).clone() for gradient in gradients]
        expected = reference_gradients(case, dist.get_world_size())
        for index, norm_type in enumerate(NORM_TYPES):
            function = list(CLIPS)[(stage + number + index) % 2]
            print(name, norm_type, function, flush=True)  # shown if the rank fails
            for gradient, values in zip(gradients, before, strict=True):
                own_of(gradient).copy_(values)
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


def test_clip(stage: int) -> None:
    answers = run_ranks(clip, 3, stage)
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


def clip_awkward(stage: int) -> None:
    """The counts of collectives, and of the numbers in them."""
    case = case_named("tied")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    expected = _total_norm(reference_gradients(case, dist.get_world_size()), 2.0)
    one_number = [1] if stage > 0 else []
    params = list(model.parameters())
    for norm_type in (1.0, 2.0, math.inf):
        clip_once = partial(zerocore.clip_grad_norm_, model, math.inf, norm_type)
        assert count_collectives(clip_once) == one_number
    assert zerocore.clip_grad_norm_(params * 2, expected / 2).item() == pytest.approx(expected)
    assert zerocore.clip_grad_norm_(model, 1e6).item() == pytest.approx(expected / 2)
    foreign = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    foreign.grad = torch.full((2, 2), expected, dtype=torch.float64)
    both = zerocore.clip_grad_norm_([*params, foreign], 1e6)
    assert both.dtype == torch.float64
    assert both.item() == pytest.approx(expected * math.sqrt(4 + 0.25))
    assert zerocore.clip_grad_norm_(foreign, 1e6).item() == pytest.approx(expected * 2)
    for param in params:
        param.grad = None
    assert count_collectives(partial(zerocore.clip_grad_norm_, model, 1.0)) == one_number
    assert zerocore.clip_grad_norm_(model, 1.0).item() == 0.0


def test_tied_repeated_missing_and_other_parameters(stage: int) -> None:
    run_ranks(clip_awkward, 3, stage)


def clip_half(stage: int) -> None:
    """Squares and sums that float16 cannot hold."""
    model = zerocore.shard(nn.Linear(64, 64, dtype=torch.float16), stage=stage)
    for function in CLIPS.values():
        for norm_type, root in ((1.0, 1.0), (2.0, 0.5), (math.inf, 0.0)):
            for param in model.parameters():
                param.grad = None
            model(torch.ones(1, 64, dtype=torch.float16)).sum().backward()
            value = 2.0 if norm_type == 1.0 else 400.0
            for param in model.parameters():
                assert param.grad is not None
                param.grad.fill_(value)
            norm = function(model.parameters(), 1.0, norm_type).item()
            assert norm == pytest.approx(value * (64 * 65) ** root, rel=1e-3)


def test_half_precision(stage: int) -> None:
    run_ranks(clip_half, 2, stage)


def clip_groups() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([1, 0])]
    models = [zerocore.shard(nn.Linear(4, 4), group=group) for group in halves]
    params = [param for model in models for param in model.parameters()]
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    clip_both = partial(zerocore.clip_grad_norm_, params, 1e6)
    assert count_collectives(clip_both) == [1, 1]
    assert clip_both().item() == pytest.approx(math.sqrt(2 * 4 * 5))  # of ones


def test_parameters_of_several_groups_have_one_norm() -> None:
    run_ranks(clip_groups, 2)


def clip_wrongly() -> None:
    model = zerocore.shard(nn.Linear(4, 4))
    for norm_type in (0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="norm_type: expected p > 0 or inf"):
            zerocore.clip_grad_norm_(model, 1.0, norm_type)
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm: expected 0 or more"):
            zerocore.clip_grad_norm_(model, max_norm)


def test_wrong_arguments() -> None:
    run_ranks(clip_wrongly, 2)


REDUCING = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "std": torch.std,
    "dot": lambda gradient: torch.dot(gradient.view(-1), gradient.view(-1)),
}


def reduce_all(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    gradient = dict(model.named_parameters())["blocks.0.linear.weight"].grad
    expected = reference_gradients(case, dist.get_world_size())["blocks.0.linear.weight"]
    assert gradient is not None
    for function in REDUCING.values():
        torch.testing.assert_close(function(gradient), function(expected))


def test_reductions_are_global(stage: int) -> None:
    run_ranks(reduce_all, 2, stage)
