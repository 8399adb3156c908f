"""Checksums in C++ beside zlib's."""

from __future__ import annotations

import re
import zlib

import pytest
import torch
from torch import Tensor

from tests.bindings import _C_testing
from zerocore import _C


def test_sums_are_those_of_zlib() -> None:
    memory = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for nbytes in (*range(300), 4096, 4975):
        for start in (0, 1, 7):
            data = memory[start : start + nbytes]
            expected = zlib.crc32(bytes(data.tolist()), 12345)
            assert _C.crc32(data, 12345) == expected
            assert _C_testing.crc32_by_tables(data.numpy(), 12345) == expected


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(4, 6).t(), "Strided Float of shape [6, 4], strides [1, 6] on cpu"),
        (torch.zeros(8, dtype=torch.uint8)[::2], "Strided Byte of shape [4], strides [2] on cpu"),
        (torch.zeros(2, device="meta"), "Strided Float of shape [2], strides [1] on meta"),
        (torch.zeros(3).to_sparse(), "Sparse Float of shape [3] on cpu"),
    ],
)
def test_tensors_without_plain_memory_are_refused(tensor: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"on the CPU, got {said}")):
        _C.crc32(tensor)
