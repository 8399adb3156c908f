"""``zerocore.clip_grad_norm_`` of DTensors, and of lists where some parameters are plain ones."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerocore
from tests.by_night import by_night
from tests.distributed.collectives import count_collectives
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ENGINES, Block, loss_of, make_net, shard_blocks, tokens_of

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def full_gradients(model: nn.Module) -> list[Tensor]:
    """With those of plain parameters as they are."""
    grads: list[Any] = [param.grad for param in model.parameters()]
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return [grad.clone() for grad in full]


def norm_of(gradients: list[Tensor], norm_type: float) -> float:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    return float(torch.linalg.vector_norm(flat, norm_type))


def sharded(fsdp: Any, shape: tuple[int, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    model = shard_blocks(fsdp, make_net(), mesh=mesh)
    loss_of(model, tokens_of(0)).backward()
    return model


def clip_as_torch(shape: tuple[int, ...]) -> list[float]:
    """Of both engines' models, beside torch's function on FSDP2's."""
    norms = []
    for norm_type in NORM_TYPES:
        reference = sharded(ENGINES["torch"], shape)
        before = full_gradients(reference)
        expected = norm_of(before, norm_type)
        if norm_type < math.inf:  # torch's raises on a rank without elements
            theirs: Any = nn.utils.clip_grad_norm_(
                reference.parameters(), expected / 2, norm_type, foreach=True
            )
            assert theirs.full_tensor().item() == pytest.approx(expected, rel=1e-5)
        for fsdp in ENGINES.values():
            model = sharded(fsdp, shape)
            norm = zerocore.clip_grad_norm_(model, expected / 2, norm_type)
            assert not isinstance(norm, DTensor) and norm.dim() == 0
            assert norm.item() == pytest.approx(expected, rel=1e-6)
            torch.testing.assert_close(full_gradients(model), [grad / 2 for grad in before])
            if norm_type < math.inf:
                torch.testing.assert_close(full_gradients(model), full_gradients(reference))
            norms.append(norm.item())
    return norms


@pytest.mark.one_by_day
@pytest.mark.parametrize("shape", [(2,), *by_night(((4,),)), (2, 2)])
def test_norms_and_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    answers = run_ranks(clip_as_torch, math.prod(shape), shape)
    assert answers[1:] == answers[:-1]


def clip_mixtures() -> None:
    """DTensors, shards of zerocore.shard and plain parameters in one list, in any order."""
    plain = Block()
    generator = torch.Generator().manual_seed(0)
    for param in plain.parameters():
        param.grad = torch.randn(param.shape, generator=generator)  # as if they were averaged
    by_shard = zerocore.shard(nn.Linear(5, 7))
    by_shard(torch.ones(1, 5) * dist.get_rank()).sum().backward()
    grads = [param.grad.full_tensor() for param in by_shard.parameters()]
    others = list(plain.parameters())
    for engine, fsdp in ENGINES.items():
        model = sharded(fsdp, (dist.get_world_size(),))
        for extra, values in (
            (others, [param.grad.clone() for param in others]),
            ([*by_shard.parameters(), *others], [*grads, *(p.grad.clone() for p in others)]),
        ):
            given = [*extra[1:], *model.parameters(), extra[0]]
            if engine == "torch":
                with pytest.raises((RuntimeError, ValueError, TypeError)):
                    nn.utils.clip_grad_norm_(given, 1e9)
            for norm_type in NORM_TYPES:
                expected = norm_of([*values, *full_gradients(model)], norm_type)
                if engine == "zerocore":
                    norm = nn.utils.clip_grad_norm_(given, 1e9, norm_type, foreach=False)
                    assert norm.item() == pytest.approx(expected, rel=1e-5)
                norm = zerocore.clip_grad_norm_(given, 1e9, norm_type)
                assert norm.item() == pytest.approx(expected, rel=1e-5)
            before = copy.deepcopy(values[0]), full_gradients(model)
            zerocore.clip_grad_norm_(given, 0.25 * norm_of([*values, *before[1]], 2.0))
            torch.testing.assert_close(full_gradients(model), [0.25 * g for g in before[1]])
            for param, value in zip(others, values[-len(others) :], strict=True):
                torch.testing.assert_close(param.grad, 0.25 * value)
                param.grad.copy_(value)
            for param, value in zip(by_shard.parameters(), grads, strict=True):
                param.grad = value.clone()


@pytest.mark.one_by_day
@pytest.mark.parametrize("num_ranks", [1, 2, *by_night(4)])
def test_lists_where_only_some_are_sharded(num_ranks: int) -> None:
    run_ranks(clip_mixtures, num_ranks)


def name_the_bad_one() -> tuple[str, str | None, int | None]:
    model = sharded(ENGINES["zerocore"], (dist.get_world_size(),))
    clip = partial(zerocore.clip_grad_norm_, model, 1e9, error_if_nonfinite=True)
    assert count_collectives(clip) == [1]
    bad: Any = dict(model.named_parameters())["blocks.1.qkv.weight"]
    if dist.get_rank() == 2:
        bad.grad.to_local()[-1] = math.nan
    before = full_gradients(model)
    with pytest.raises(zerocore.optim.NonFiniteGradError) as caught:
        zerocore.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    torch.testing.assert_close(full_gradients(model), before, equal_nan=True)
    return str(caught.value), caught.value.fqn, caught.value.rank


def test_a_gradient_that_is_not_finite_is_named_on_every_rank() -> None:
    answers = run_ranks(name_the_bad_one, 4)
    assert {answer[1:] for answer in answers} == {("blocks.1.qkv.weight", 2)}
    assert answers[1:] == answers[:-1]
