"""Packing, summing and casting on the CPU against plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.by_night import by_night
from tests.kernels.cases import (
    CASTS,
    COUNTS,
    check_accumulate,
    check_cast,
    check_large,
    check_pack,
    filled,
    ops,
    wide,
)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_pack(dst: torch.dtype, src: torch.dtype, count: int) -> None:
    check_pack("cpu", dst, src, count, start=0)
    check_pack("cpu", dst, src, count, start=1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_dtypes_that_are_only_moved(dtype: torch.dtype) -> None:
    values = torch.arange(40).remainder(2).to(dtype)
    bucket = torch.zeros(44, dtype=dtype)
    ops.cast(bucket, [values[:30], values[30:]], [3, 34])
    expected = torch.zeros(44, dtype=torch.float32)
    expected[3:33], expected[34:] = values[:30].float(), values[30:].float()
    assert torch.equal(bucket.float(), expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_cast(dst: torch.dtype, src: torch.dtype, count: int) -> None:
    check_cast("cpu", dst, src, count)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 8])
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_accumulate(dst: torch.dtype, src: torch.dtype, num_chunks: int) -> None:
    check_accumulate("cpu", dst, src, num_chunks)


@pytest.mark.parametrize(("dst", "src"), [*by_night(*CASTS[:2], *CASTS[4:]), *CASTS[2:4]])
def test_large_calls(dst: torch.dtype, src: torch.dtype) -> None:
    check_large(dst, src)


@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_a_scale_that_rounds(dst: torch.dtype, src: torch.dtype) -> None:
    grad, bucket = filled(1000, src, "cpu"), filled(1000, dst, "cpu")
    expected = (wide(bucket) + wide(grad) / 3).to(dst)
    ops.pack(bucket, [grad], [0], [1000], add=[True], scale=1 / 3)
    torch.testing.assert_close(bucket, expected)


def test_a_transposed_parameter_is_read_in_storage_order() -> None:
    values = torch.arange(6.0)
    bucket = torch.empty(8)
    ops.pack(bucket, [values.view(2, 3).t()], [1], [6])
    assert torch.equal(bucket, torch.cat([torch.zeros(1), values, torch.zeros(1)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_value_survives_a_cast_to_float_and_back(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    there = torch.empty(every.numel())
    ops.cast(there, [every], [0])
    assert torch.equal(there, every.float())
    back = torch.empty_like(every)
    ops.cast(back, [there], [0])
    assert torch.equal(back.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even_and_overflow_to_infinity(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    found = torch.empty(values.numel(), dtype=dtype)
    ops.cast(found, [values], [0])
    torch.testing.assert_close(found, values.to(dtype), rtol=0, atol=0, equal_nan=True)
