"""Numbers of one byte with a scale for each block: the bytes and values that the CPU's loops make."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import NARROW, ops
from tests.kernels.test_scaled import BLOCK, BLOCK_NBYTES, FORMATS


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_blocks(
    device: torch.device, dtype: torch.dtype, source: torch.dtype, num_blocks: int
) -> None:
    sizes = torch.logspace(-3, 3, num_blocks * BLOCK)
    values = (torch.randn(num_blocks * BLOCK) * sizes).to(source)
    expected = torch.empty(num_blocks * BLOCK_NBYTES, dtype=torch.uint8)
    found = torch.full_like(expected, 77, device=device)
    ops.encode(expected, values, dtype)
    ops.encode(found, values.to(device), dtype)
    assert torch.equal(found.cpu(), expected)
    for first in (0, 4, 5, 127):  # words, and numbers one by one
        plain = torch.empty(values.numel() - first, dtype=source)
        decoded = torch.full_like(plain, 77.0, device=device)
        ops.decode(plain, expected, dtype, first)
        ops.decode(decoded, found, dtype, first)
        assert torch.equal(decoded.cpu(), plain)


def test_a_wrong_address_leaves_the_device_usable(device: torch.device) -> None:
    values = torch.ones(BLOCK + 1, device=device)
    blocks = torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="encode: values begins 4 bytes behind a multiple of 16"):
        ops.encode(blocks, values[1:], torch.int8)
    ops.encode(blocks, values[:-1], torch.int8)
    assert blocks[0].item() == 127
