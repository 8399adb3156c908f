"""A gradient that is not finite: every rank sees the norm, and is told where it is."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.collectives import count_collectives
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named
from tests.distributed.values import own_of

RANKS = 3


def spoiled(stage: int, value: float, rank: int) -> tuple[nn.Module, str]:
    """A model whose gradients have `value` among the elements of `rank`, from some parameter on.

    At stage 0, where gradients are replicated, all ranks have it. Returns the parameter's name.
    """
    case = case_named("empty_shards")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)
    names = [name for name, param in model.named_parameters() if own_of(param).numel() > 0]
    # Another rank may own none of what this one owns most of.
    owned: list[list[str]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(owned, names)
    chosen = owned[rank][1:]
    for name, param in model.named_parameters():
        if name in chosen and (stage == 0 or dist.get_rank() == rank):
            assert param.grad is not None
            own_of(param.grad)[-1] = value
    return model, chosen[0]


def local_gradients(model: nn.Module) -> list[Tensor]:
    return [own_of(p.grad).clone() for p in model.parameters() if p.grad is not None]


def name_it(stage: int) -> list[tuple[str, str | None, int | None]]:
    said = []
    for value, rank in product((math.nan, math.inf), range(RANKS)):
        model, name = spoiled(stage, value, rank)
        before = local_gradients(model)
        for norm_type in (1.0, 2.0, math.inf):
            clip = partial(zerocore.clip_grad_norm_, model, 1.0, norm_type, error_if_nonfinite=True)
            with pytest.raises(zerocore.optim.NonFiniteGradError) as caught:
                clip()
            error = caught.value
            assert (error.fqn, error.rank) == (name, rank if stage > 0 else None)
            assert f"'{name}'" in str(error) and not math.isfinite(error.norm)
            torch.testing.assert_close(
                local_gradients(model), before, rtol=0, atol=0, equal_nan=True
            )
            said.append((str(error), error.fqn, error.rank))
    return said


def test_the_first_bad_gradient_is_named_on_every_rank(stage: int) -> None:
    answers = run_ranks(name_it, RANKS, stage)
    assert answers[1:] == answers[:-1]


def return_it(stage: int, function: str) -> list[str]:
    clip = {"torch": torch.nn.utils.clip_grad_norm_, "zerocore": zerocore.clip_grad_norm_}[function]
    norm_types = [1.0, 2.0, math.inf]
    if stage == 0 and function == "torch":
        norm_types.pop()  # torch finds no maximum of a gradient without elements
    norms = []
    for value, rank in product((math.nan, math.inf), range(RANKS)):
        model, _ = spoiled(stage, value, rank)
        before = local_gradients(model)
        for norm_type in norm_types:
            norm = clip(model.parameters(), 1.0, norm_type).item()
            assert math.isnan(norm) == math.isnan(value) and not math.isfinite(norm)
            norms.append(str(norm))
            given = [param.grad for param in model.parameters() if param.grad is not None]
            for grad, values in zip(given, before, strict=True):  # which have been clipped
                own_of(grad).copy_(values)
    return norms


@pytest.mark.parametrize("function", ["torch", "zerocore"])
def test_the_norm_is_the_same_on_every_rank(stage: int, function: str) -> None:
    answers = run_ranks(return_it, RANKS, stage, function)
    assert answers[1:] == answers[:-1]


def count_and_skip(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, case, 0)
    clip = partial(zerocore.clip_grad_norm_, model, 1.0, error_if_nonfinite=True)
    one_number = [1] if stage > 0 else []
    assert count_collectives(clip) == one_number
    gradient = next(p.grad for p in model.parameters() if p.grad is not None and own_of(p).numel())
    if stage == 0 or dist.get_rank() == 1:
        own_of(gradient)[-1] = math.inf
    before = zerocore.full_state_dict(model, rank0_only=False)

    def step() -> None:
        try:
            clip()
            optimizer.step()
        except zerocore.optim.NonFiniteGradError:
            optimizer.zero_grad()

    assert count_collectives(step) == one_number * 2
    after = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    accumulate(model, case, 1)
    step()
    after = zerocore.full_state_dict(model, rank0_only=False)
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_a_step_is_skipped_and_the_next_one_made(stage: int) -> None:
    run_ranks(count_and_skip, 2, stage)


def overflow(stage: int) -> None:
    model = zerocore.shard(nn.Linear(8, 8), stage=stage)
    model(torch.ones(1, 8)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.fill_(1e30)
    clip = partial(zerocore.clip_grad_norm_, error_if_nonfinite=True)
    with pytest.raises(zerocore.optim.NonFiniteGradError, match="every value is finite") as caught:
        clip(model, 1.0)
    assert (caught.value.norm, caught.value.fqn) == (math.inf, None)
    assert clip(model, 1.0, math.inf).item() == pytest.approx(1e30)
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(zerocore.optim.NonFiniteGradError, match=r"parameters\[2\] \(not sharded\)"):
        clip([*model.parameters(), foreign], 1.0)


def test_norms_that_overflow_and_parameters_that_are_not_sharded(stage: int) -> None:
    run_ranks(overflow, 2, stage)
