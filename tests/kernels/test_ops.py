"""The operators as torch sees them: schemas, meta tensors, tracing, wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import ops

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(device: str = "cpu") -> dict[str, Arguments]:
    """Valid arguments of every operator."""

    def make(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(numel, dtype=dtype, device=device)

    half = torch.bfloat16
    return {
        "pack": (
            (make(64, half), [make(5), None, make(3)], [0, 16, 32], [5, 10, 3]),
            {"add": [False, False, True], "scale": 0.5},
        ),
        "accumulate": ((make(8), make(24, half), 3), {"add": True, "scale": 0.5}),
        "cast": ((make(16, half), [make(4), make(4)], [0, 8]), {}),
        "encode": ((make(264, torch.uint8), make(256, half), torch.int8), {}),
        "decode": ((make(200, half), make(264, torch.uint8), torch.int8, 3), {}),
        "sum_of_squares": ((make(2, torch.float64), [make(3), make(4, half)]), {}),
    }


NAMES = sorted(arguments())


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    args, kwargs = arguments()[name]
    torch.library.opcheck(getattr(ops, name).default, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_are_checked_and_not_touched(name: str) -> None:
    args, kwargs = arguments("meta")[name]
    assert getattr(ops, name)(*args, **kwargs) is None
    wrong = list(args)
    wrong[0] = torch.empty(3, 3, device="meta")
    with pytest.raises((ValueError, TypeError)):
        getattr(ops, name)(*wrong, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_outputs_change(name: str) -> None:
    args, kwargs = arguments()[name]
    inputs = tensors_in(args[1:])
    before = [tensor.clone() for tensor in inputs]
    getattr(ops, name)(*args, **kwargs)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


def test_nothing_to_do() -> None:
    empty, sums = torch.empty(0), torch.ones(2, dtype=torch.float64)
    ops.pack(empty, [], [], [])
    ops.pack(empty, [empty, None], [0, 0], [0, 0])
    ops.cast(empty, [empty], [0])
    ops.accumulate(empty, empty, 4)
    ops.sum_of_squares(sums, [empty])
    assert sums.tolist() == [0, 0]
    ops.sum_of_squares(sums, [])
    assert sums.tolist() == [0, 0]


def test_padding_alone_is_zeroed() -> None:
    bucket = torch.ones(5)
    ops.pack(bucket, [None], [1], [2], add=[True])
    assert bucket.tolist() == [0, 1, 1, 0, 0]


ONES, GRID = torch.ones(4), torch.ones(2, 2)
DOUBLES = torch.ones(4, dtype=torch.float64)
SUMS = torch.ones(2, dtype=torch.float64)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ops.pack(GRID, [], [], []), ValueError, "bucket must be a contiguous 1-D tensor"),
    (lambda: ops.pack(ONES, [ONES], [0], []), ValueError, "got 0 numels for 1 gradients"),
    (lambda: ops.pack(ONES, [ONES], [1], [4]), ValueError, r"\[1, 5\), expected within the 4"),
    (lambda: ops.pack(ONES, [ONES[:2]], [0], [3]), ValueError, "expected within the 2 elements"),
    (lambda: ops.pack(ONES, [None, None], [2, 1], [1, 1]), ValueError, "expected at least 3"),
    (lambda: ops.pack(ONES, [DOUBLES], [0], [4]), TypeError, "cannot convert Double to Float"),
    (lambda: ops.pack(ONES.int(), [None], [0], [4]), TypeError, "cannot convert Int to Int"),
    (lambda: ops.pack(ONES, [torch.ones(8)[::2]], [0], [4]), ValueError, "must be dense"),
    (lambda: ops.pack(ONES, [ONES], [0], [4], add=[]), ValueError, "got 0 add flags"),
    (lambda: ops.accumulate(ONES, ONES, 0), ValueError, "num_chunks is 0"),
    (lambda: ops.accumulate(ONES, ONES, 2), ValueError, "has 4 elements, expected 2 times the 4"),
    (lambda: ops.accumulate(ONES, DOUBLES), TypeError, "cannot convert Double to Float"),
    (lambda: ops.cast(ONES, [ONES], []), ValueError, "got 0 offsets for 1 sources"),
    (lambda: ops.cast(ONES, [ONES[:2], DOUBLES[:2]], [0, 2]), TypeError, "source 1 is Double"),
    (lambda: ops.cast(ONES, [ONES.int()], [0]), TypeError, "it only moves other dtypes"),
    (lambda: ops.cast(ONES, [ONES], [2]), ValueError, r"\[2, 6\)"),
    (lambda: ops.sum_of_squares(ONES, [ONES]), ValueError, "must be float64 of 2 elements"),
    (lambda: ops.sum_of_squares(SUMS, [ONES.int()]), TypeError, "shard 0 is Int"),
    (lambda: ops.sum_of_squares(SUMS, [ONES], known=[ONES]), ValueError, "float64 of 2 elements"),
    (lambda: ops.sum_of_squares(SUMS, [ONES], known=[SUMS, SUMS]), ValueError, "got 2 known for 1"),
    (lambda: ops.cast(ONES, [ONES.to("meta")], [0]), ValueError, "is on meta, expected cpu"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(ONES, torch.ones(4))
