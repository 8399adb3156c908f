"""Checksums in C++ beside zlib's, and bytes of files with theirs."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from zerocore import _C


@pytest.mark.parametrize("by_tables", [False, True])
def test_sums_are_those_of_zlib(by_tables: bool) -> None:
    memory = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for nbytes in (*range(300), 4096, 4975):
        for start in (0, 1, 7):
            data = memory[start : start + nbytes]
            expected = zlib.crc32(bytes(data.tolist()), 12345)
            assert _C.crc32(data.data_ptr(), nbytes, 12345, by_tables) == expected


def test_sums_of_two_runs() -> None:
    data = bytes(torch.randint(0, 256, (100_000,), dtype=torch.uint8).tolist())
    for cut in (0, 1, 8, 4097, 99_999, 100_000):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert _C.crc32_joined(first, second, len(data) - cut) == zlib.crc32(data)


def test_bytes_of_files(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    path = tmp_path / "file"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    half = _C.write_at(file, data.data_ptr(), 600_000, 5)
    whole = _C.write_at(file, data.data_ptr() + 600_000, 400_003, 600_005, half)
    assert path.read_bytes() == b"\0" * 5 + bytes(data.tolist())
    assert whole == zlib.crc32(bytes(data.tolist())) == _C.crc32_at(file, 5, 1_000_003)
    with pytest.raises(OSError, match="Input/output error"):
        _C.crc32_at(file, 5, 1_000_004)
    os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _C.write_at(file, data.data_ptr(), 1, 0)
