"""The kernels on a GPU: the checks of tests/kernels, launches, streams, no waiting."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.profiled import names_of_work
from tests.kernels.cases import (
    CASTS,
    COUNTS,
    NARROW,
    check_accumulate,
    check_cast,
    check_pack,
    check_sum_of_squares,
    ops,
)
from zerocore._C import HAS_CUDA_KERNELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BLOCK, BLOCK_NBYTES = 128, 132


def test_the_build_has_cuda_kernels() -> None:
    assert HAS_CUDA_KERNELS


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_pack(dst: torch.dtype, src: torch.dtype, count: int) -> None:
    check_pack("cuda", dst, src, count, start=0)
    check_pack("cuda", dst, src, count, start=1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_cast(dst: torch.dtype, src: torch.dtype, count: int) -> None:
    check_cast("cuda", dst, src, count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_bytes(dtype: torch.dtype, count: int) -> None:
    check_cast("cuda", dtype, dtype, count)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 8])
@pytest.mark.parametrize(("dst", "src"), CASTS)
def test_accumulate(dst: torch.dtype, src: torch.dtype, num_chunks: int) -> None:
    check_accumulate("cuda", dst, src, num_chunks)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
def test_sum_of_squares(dtype: torch.dtype, count: int) -> None:
    check_sum_of_squares("cuda", dtype, count)


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_scaled_blocks(num_blocks: int, dtype: torch.dtype, form: torch.dtype) -> None:
    """The bits of the CPU's loops, which tests/kernels/test_scaled.py compares with torch."""
    count = num_blocks * BLOCK
    values = (torch.randn(count) * torch.logspace(-3, 3, count)).to(dtype)
    values[::7] = 0.0
    expected = torch.empty(num_blocks * BLOCK_NBYTES, dtype=torch.uint8)
    found = torch.full_like(expected, 77).cuda()
    ops.encode(expected, values, form)
    ops.encode(found, values.cuda(), form)
    assert torch.equal(found.cpu(), expected)
    for first in (0, 1, 4, 5, 127):
        for start in (0, 1):  # of the output, in elements behind an aligned address
            out = torch.full((start + count - first,), 7.0, dtype=dtype, device="cuda")[start:]
            back = torch.empty(count - first, dtype=dtype)
            ops.decode(back, expected, form, first)
            ops.decode(out, found, form, first)
            assert torch.equal(out.cpu(), back), (first, start)


def test_a_wrong_address_leaves_the_device_usable() -> None:
    values = torch.ones(BLOCK + 1, device="cuda")
    blocks = torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="encode: source starts at an address that is 4 modulo 16"):
        ops.encode(blocks, values[1:], torch.int8)
    ops.encode(blocks, values[:-1], torch.int8)
    assert blocks[0].item() == 127


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (150, 1), (1000, 1), (2000, 2)])
def test_one_launch_for_a_thousand_tensors(count: int, launches: int) -> None:
    grads = [torch.ones(32, device="cuda") for _ in range(count)]
    bucket = torch.empty(32 * count, device="cuda")
    offsets = [32 * i for i in range(count)]
    work = names_of_work(lambda: ops.pack(bucket, grads, offsets, [32] * count, scale=0.5))
    assert ["copy_kernel" in name for name in work] == [True] * launches, work
    assert torch.equal(bucket, torch.full_like(bucket, 0.5))


def test_nothing_waits_for_the_device() -> None:
    out = torch.empty(2, dtype=torch.float64, device="cuda")
    bucket, shard = torch.empty(4096, device="cuda"), torch.empty(1024, device="cuda")
    grads = [torch.ones(2000, device="cuda")]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.pack(bucket, grads, [5], [2000], scale=0.5)
        ops.accumulate(shard, bucket, 4)
        ops.sum_of_squares(out, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.tolist() == [2000, 0]


def test_later_calls_do_not_disturb_earlier_ones() -> None:
    """The table of a call that waits in the stream must not be shared with the next call's."""
    buckets = [torch.empty(64 * 300, device="cuda") for _ in range(8)]
    grads = [torch.full((64,), float(i), device="cuda") for i in range(8)]
    offsets = [64 * i for i in range(300)]
    torch.cuda._sleep(20_000_000)
    for bucket, grad in zip(buckets, grads, strict=True):
        ops.pack(bucket, [grad] * 300, offsets, [64] * 300)
    for i, bucket in enumerate(buckets):
        assert torch.equal(bucket, torch.full_like(bucket, float(i)))


def test_kernels_run_on_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    source, bucket = torch.zeros(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        source.fill_(3)
        ops.cast(bucket, [source], [0])
    stream.synchronize()
    assert torch.equal(bucket, torch.full_like(bucket, 3.0))
