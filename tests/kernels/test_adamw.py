"""The AdamW kernel on the CPU: the bits of torch's fused one, scale, skipping, wrong arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.adamw_cases import (
    BF16,
    F16,
    F32,
    F64,
    KINDS,
    OPTIONS,
    Lists,
    check_adamw,
    make_lists,
)
from zerocore._C import CHUNK_NUMEL

LR = {"lr": 1e-2}
# torch's vectorised loop, by capability; its scalar loop takes what is left of a tensor.
VECTOR_NBYTES = {"AVX512": 64, "AVX2": 32}


@pytest.mark.parametrize("count", [1, 2, 13, 150])
@pytest.mark.parametrize(("weight", "grad", "model"), KINDS)
def test_steps(
    weight: torch.dtype, grad: torch.dtype, model: torch.dtype | None, count: int
) -> None:
    check_adamw("cpu", weight, grad, model, count)


def flat_case(numel: int, dtype: torch.dtype, seed: int) -> Lists:
    torch.manual_seed(seed)
    weight, grad = (torch.randn(numel).to(dtype) for _ in range(2))
    zeros = [torch.zeros(numel, dtype=dtype)], [torch.zeros(numel, dtype=dtype)]
    return Lists([weight], [grad * 1e-2], *zeros, [torch.tensor(0.0)], [])


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in VECTOR_NBYTES, reason="torch has a scalar loop"
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("numel", [64, 1000, 3 * CHUNK_NUMEL + 7, 1_000_003])
def test_bits_of_torch(numel: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """All of them, but for the elements that torch leaves to its scalar loop; see adamw.h."""
    own = flat_case(numel, dtype, numel)
    torchs = own.clone()
    lanes = VECTOR_NBYTES[torch.backends.cpu.get_cpu_capability()] // dtype.itemsize
    body = numel - numel % lanes
    for step in range(5):
        own.step(**options)
        torchs.step_of_torch(**options)
        for found, expected in zip(own.all()[:4], torchs.all()[:4], strict=True):
            assert torch.equal(found[0][:body], expected[0][:body])
        if step == 0:
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(own.exp_avg_sqs, torchs.exp_avg_sqs, rtol=ulp, atol=0)
        for tensor, like in zip(own.grads, torchs.grads, strict=True):
            like.copy_(tensor.mul_(-0.7))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_cut_tensor_gets_the_same_bits(dtype: torch.dtype) -> None:
    """However a parameter is cut into shards, and whichever thread takes which part."""
    whole = flat_case(50_021, dtype, 1)
    cuts = [0, 1, 18, 8_000, 8_001, 31_337, 50_021]
    parts = Lists(
        *(
            [tensors[0][a:b].clone() for a, b in itertools.pairwise(cuts)]
            for tensors in whole.all()[:4]
        ),
        [torch.tensor(0.0) for _ in cuts[1:]],
        [],
    )
    for _ in range(3):
        whole.step(**OPTIONS[0])
        parts.step(**OPTIONS[0])
    for tensors, found in zip(whole.all()[:4], parts.all()[:4], strict=True):
        assert torch.equal(tensors[0], torch.cat(found))


@pytest.mark.parametrize("device_lr", [False, True])
def test_scale_lr_and_found_inf_as_tensors(device_lr: bool) -> None:
    own = make_lists(20, "cpu")
    expected = own.clone()
    for grad in expected.grads:
        grad *= 0.25
    lr = torch.tensor(0.125) if device_lr else None
    zero = torch.tensor(0.0)
    own.step(lr=0.125, lr_tensor=lr, grad_scale=torch.tensor(0.25), found_inf=zero)
    expected.step(lr=0.125)
    assert torch.equal(torch.cat(own.weights), torch.cat(expected.weights))
    assert torch.equal(torch.cat(own.exp_avg_sqs), torch.cat(expected.exp_avg_sqs))
    before = own.clone()
    own.step(**LR, found_inf=torch.tensor(2.0))
    for found, kept in zip(own.all(), before.all(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, kept, strict=True))


def test_steps_are_counted_for_each_tensor_empty_ones_too() -> None:
    own = make_lists(13, "cpu")
    assert any(weight.numel() == 0 for weight in own.weights)
    before = [step.item() for step in own.steps]
    own.step(**LR)
    assert [step.item() for step in own.steps] == [step + 1 for step in before]


def test_a_gradient_in_another_order_of_memory() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    grad = torch.randn(2, 8, 4, 4)
    lists = [[weight.clone()], [grad], [torch.zeros_like(weight)], [torch.zeros_like(weight)]]
    expected = [torch.randn(0), weight.contiguous(), torch.zeros_like(grad), torch.zeros_like(grad)]
    step = torch.tensor(0.0)
    torch.ops.zerocore.adamw(*lists, [step.clone()], [], **LR)
    torch.ops.zerocore.adamw([expected[1]], [grad], [expected[2]], [expected[3]], [step], [], **LR)
    assert lists[0][0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(lists[0][0], expected[1])
    assert torch.equal(lists[3][0], expected[3])


def test_opcheck() -> None:
    lists = [[filled.clone() for filled in kind] for kind in make_lists(3, "cpu", model=BF16).all()]
    options = {**OPTIONS[0], "grad_scale": torch.tensor(0.5), "found_inf": torch.tensor(0.0)}
    torch.library.opcheck(torch.ops.zerocore.adamw.default, tuple(lists), options)


def test_meta_tensors_are_checked_and_not_touched() -> None:
    lists = [[tensor.to("meta") for tensor in kind] for kind in make_lists(3, "cpu").all()]
    torch.ops.zerocore.adamw(*lists, **LR)
    lists[2][1] = torch.empty(5, 5, device="meta")
    with pytest.raises(ValueError, match="exp_avg 1 has 25 elements"):
        torch.ops.zerocore.adamw(*lists, **LR)


def test_gradients_are_not_changed_and_autograd_sees_that_weights_are() -> None:
    own = make_lists(5, "cpu")
    before = [grad.clone() for grad in own.grads]
    versions = [weight._version for weight in own.weights]
    own.step(**LR, grad_scale=torch.tensor(0.5))
    assert all(torch.equal(*pair) for pair in zip(own.grads, before, strict=True))
    assert [weight._version for weight in own.weights] == [version + 1 for version in versions]


def call(**changed: Any) -> Callable[[], None]:
    """One step of two tensors, some argument replaced."""
    lists: dict[str, Any] = {
        name: [torch.ones(4), torch.ones(3)]
        for name in ("weights", "grads", "exp_avgs", "exp_avg_sqs")
    }
    lists |= {"steps": [torch.tensor(0.0), torch.tensor(0.0)], "model_weights": []}
    return lambda: torch.ops.zerocore.adamw(**{**lists, **LR, **changed})


def ones(dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(4, dtype=dtype), torch.ones(3, dtype=dtype)]


WRONG: list[tuple[Callable[[], None], type[Exception], str]] = [
    (call(grads=[]), ValueError, "got 0 gradients for 2 weights"),
    (call(steps=[torch.tensor(0.0)]), ValueError, "got 1 steps for 2 weights"),
    (call(model_weights=ones(BF16)[:1]), ValueError, "got 1 model weights for 2 weights"),
    (call(grads=ones(F32)[::-1]), ValueError, "gradient 0 has 3 elements, expected the 4"),
    (call(grads=[torch.ones(4), torch.ones(3).bfloat16()]), TypeError, "gradient 1 is BFloat16"),
    (call(exp_avgs=ones(BF16)), TypeError, "the moments are BFloat16, expected Float"),
    (call(grads=ones(F64)), TypeError, "cannot update Float weights from Double gradients"),
    (call(model_weights=ones(F32)), TypeError, "write Float model weights"),
    (call(weights=ones(torch.int32)), TypeError, "cannot update Int weights"),
    (call(steps=ones(F32)), ValueError, "a step must be float32 of one element on cpu"),
    (call(found_inf=torch.tensor(0)), ValueError, "found_inf must be float32"),
    (call(grad_scale=torch.ones(2)), ValueError, "grad_scale must be float32 of one element"),
    (call(exp_avgs=[torch.ones(8)[::2], torch.ones(3)]), ValueError, "must be dense"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_wrong_arguments(wrong: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()
