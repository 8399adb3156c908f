"""Checksums in C++ beside zlib's."""

from __future__ import annotations

import zlib

import torch

from tests.bindings import _C_testing
from zerocore import _C


def test_sums_are_those_of_zlib() -> None:
    memory = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for nbytes in (*range(300), 4096, 4975):
        for start in (0, 1, 7):
            data = memory[start : start + nbytes]
            expected = zlib.crc32(bytes(data.tolist()), 12345)
            assert _C.crc32(data.data_ptr(), nbytes, 12345) == expected
            assert _C_testing.crc32_by_tables(data.numpy(), 12345) == expected
