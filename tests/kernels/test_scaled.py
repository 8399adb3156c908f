"""Numbers of one byte with a scale for each block: values, bounds, odd blocks, wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import NARROW, filled, ops

BLOCK, BLOCK_NBYTES = 128, 132
FORMATS = (torch.float8_e4m3fn, torch.int8)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = torch.empty(values.numel() // BLOCK * BLOCK_NBYTES, dtype=torch.uint8)
    ops.encode(blocks, values, dtype)
    return blocks


def decode(blocks: Tensor, like: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    out = torch.empty_like(like)
    ops.decode(out, blocks, dtype, first)
    return out


def expected(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and scales by torch's own casts."""
    rows = values.float().view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True) / LARGEST[dtype]
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    scaled = rows * inverse
    numbers = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return numbers, scale


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("num_blocks", [1, 3, 40])
def test_numbers_are_those_of_torch(
    dtype: torch.dtype, source: torch.dtype, num_blocks: int
) -> None:
    values = filled(num_blocks * BLOCK, source, "cpu") * torch.logspace(
        -3, 3, num_blocks * BLOCK
    ).to(source)
    blocks = encode(values, dtype).view(-1, BLOCK_NBYTES)
    numbers, scale = expected(values, dtype)
    assert torch.equal(blocks[:, :BLOCK], numbers.view(torch.uint8))
    assert torch.equal(blocks[:, BLOCK:].contiguous().view(torch.float32), scale)
    found = decode(blocks.flatten(), values, dtype)
    assert torch.equal(found, (numbers.float() * scale).to(source).flatten())


def test_every_number_comes_back() -> None:
    """All of float8, those of a block that has the largest one among them."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # NaN
    values = torch.full((256,), 448.0)
    values[:127], values[128:255] = numbers.view(torch.float8_e4m3fn).float().chunk(2)
    blocks = encode(values, torch.float8_e4m3fn).view(-1, BLOCK_NBYTES)
    assert torch.equal(
        blocks[:, :BLOCK].flatten(), values.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert torch.equal(decode(blocks.flatten(), values, torch.float8_e4m3fn), values)


@pytest.mark.parametrize("dtype", FORMATS)
def test_errors_are_bounded(dtype: torch.dtype) -> None:
    """float8: 2^-4 of a value, or 2^-10 of its block's scale; int8: half of the scale."""
    values = torch.randn(500 * BLOCK).pow(3)
    error = (decode(encode(values, dtype), values, dtype) - values).abs().view(-1, BLOCK)
    rows = values.abs().view(-1, BLOCK)
    scale = rows.amax(1, keepdim=True) / LARGEST[dtype]
    bound = torch.maximum(rows / 16, scale / 1024) if dtype in FORMATS[:1] else scale / 2
    assert bool((error <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_odd_blocks(dtype: torch.dtype) -> None:
    values = torch.randn(5 * BLOCK)
    values[:BLOCK] = 0.0
    values[BLOCK : 2 * BLOCK] = 1e-40
    values[2 * BLOCK + 7] = math.nan
    values[3 * BLOCK + 7] = -math.inf
    found = decode(encode(values, dtype), values, dtype).view(-1, BLOCK)
    assert bool((found[:2] == 0).all())
    assert not bool(found[2:4].isfinite().any())
    assert bool(found[4].isfinite().all())


def test_pieces_begin_anywhere() -> None:
    values = torch.randn(6 * BLOCK)
    blocks = encode(values, torch.int8)
    whole = decode(blocks, values, torch.int8)
    for first, numel in ((0, 1), (1, 130), (127, 2), (128, 256), (5, 700)):
        found = decode(blocks, values[:numel], torch.int8, first)
        assert torch.equal(found, whole[first : first + numel])


@pytest.mark.parametrize("dtype", NARROW)
def test_misaligned_addresses_are_refused(dtype: torch.dtype) -> None:
    """A GPU would lose its context; the CPU refuses the same, so that programs do not differ."""
    memory = torch.zeros(BLOCK + 8, dtype=dtype)
    source = memory[1 : BLOCK + 1]
    blocks = torch.zeros(BLOCK_NBYTES + 4, dtype=torch.uint8)
    past = dtype.itemsize
    message = f"encode: source starts at an address that is {past} modulo 16, expected a multiple"
    with pytest.raises(ValueError, match=message):
        ops.encode(blocks[:BLOCK_NBYTES], source, torch.int8)
    for begin in (1, 2, 3):
        view = blocks[begin : begin + BLOCK_NBYTES]
        message = f"blocks starts at an address that is {begin} modulo 4, expected a multiple of 4"
        with pytest.raises(ValueError, match=f"encode: {message} bytes. Start the view there"):
            ops.encode(view, memory[:BLOCK], torch.int8)
        with pytest.raises(ValueError, match=f"decode: {message}"):
            ops.decode(memory[:BLOCK], view, torch.int8)
    ops.encode(blocks[4:], memory[:BLOCK], torch.int8)
    ops.decode(source, blocks[4:], torch.int8)  # elements of any address


def test_wrong_arguments() -> None:
    blocks, values = torch.empty(BLOCK_NBYTES, dtype=torch.uint8), torch.ones(BLOCK)
    with pytest.raises(TypeError, match="expected float8_e4m3fn or int8"):
        ops.encode(blocks, values, torch.float8_e5m2)
    with pytest.raises(TypeError, match="expected uint8 and float32"):
        ops.encode(blocks, values.double(), torch.int8)
    with pytest.raises(ValueError, match="do not fill"):
        ops.encode(blocks, values[:-1], torch.int8)
    with pytest.raises(ValueError, match="decode"):
        ops.decode(values, blocks, torch.int8, 1)
