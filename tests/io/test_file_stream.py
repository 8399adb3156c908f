"""Files that are read once by several threads: bytes, checksums, ways, and what goes wrong."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest
import torch

from tests.io.page_cache import can_bypass_cache, drop_from_cache
from zerocore._C import FileStream, StreamWay

BLOCK = 2 << 20
Runs = list[tuple[int, int]]


def make_file(path: Path, nbytes: int) -> bytes:
    data = random.Random(5).randbytes(nbytes)
    path.write_bytes(data)
    drop_from_cache(path)
    return data


def random_runs(nbytes: int, seed: int) -> Runs:
    """Of all sizes, some without bytes, with and without bytes between them."""
    choose, runs, at = random.Random(seed), [], 0
    while at < nbytes:
        at += choose.choice([0, 0, 1, 100, 5000, BLOCK])
        size = choose.choice([0, 1, 63, 4096, 70_001, BLOCK, BLOCK + 17, 3 * BLOCK])
        if at + size > nbytes:
            break
        runs.append((at, size))
        at += size
    return runs


def check(stream: FileStream, data: bytes, runs: Runs, first: int = 0, end: int = 99) -> None:
    places = [torch.zeros(size + 2, dtype=torch.uint8) for _, size in runs]
    asked = [
        (offset, place[1 : size + 1]) for (offset, size), place in zip(runs, places, strict=True)
    ]
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    assert stream.read(asked) == [zlib.crc32(block) for block in blocks[first:end]]
    for (offset, size), place in zip(runs, places, strict=True):  # and not a byte around it
        assert place.numpy().tobytes() == b"\0" + data[offset : offset + size] + b"\0"


@pytest.mark.parametrize("way", [StreamWay.CACHED, StreamWay.DIRECT, StreamWay.ANY], ids=str)
def test_runs_and_the_sums_of_blocks(way: StreamWay, tmp_path: Path) -> None:
    if way == StreamWay.DIRECT and not can_bypass_cache(tmp_path):
        pytest.skip("the file system has no reads past the page cache")
    path = tmp_path / "file"
    for nbytes in (0, 1, 4097, BLOCK, 9 * BLOCK + 4099):
        data = make_file(path, nbytes)
        for seed, ahead in ((1, 0), (2, 3 * BLOCK), (3, 100 * BLOCK)):
            runs = random_runs(nbytes, seed) if seed > 1 else [(0, nbytes)]
            check(FileStream(str(path), ahead, 3, way), data, runs)
    for first, end in ((0, 2), (3, 7), (9, 10), (9, 50), (10, 20)):
        check(FileStream(str(path), 0, 3, way, first, end), data, [], first, end)
    runs = [(3 * BLOCK + 5, BLOCK), (4 * BLOCK + 5, 2 * BLOCK - 5)]
    check(FileStream(str(path), 0, 3, way, 3, 6), data, runs, 3, 6)


def test_what_is_cached_is_not_read_past_the_cache(tmp_path: Path) -> None:
    if not can_bypass_cache(tmp_path):
        pytest.skip("the file system has no reads past the page cache")
    path = tmp_path / "file"
    make_file(path, 8 * BLOCK)
    assert FileStream(str(path)).is_direct
    path.read_bytes()
    assert not FileStream(str(path)).is_direct
    make_file(path, BLOCK)
    assert not FileStream(str(path)).is_direct  # of one block


@pytest.mark.parametrize("way", [StreamWay.CACHED, StreamWay.ANY], ids=str)
def test_what_goes_wrong_names_the_file(way: StreamWay, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match=str(path)):
        FileStream(str(path), way=way)
    make_file(path, 9 * BLOCK)
    with pytest.raises(OSError, match=f"'{path}' ends at byte {9 * BLOCK}"):
        FileStream(str(path), way=way).read([(0, torch.empty(9 * BLOCK + 1, dtype=torch.uint8))])
    two, five = torch.empty(2, dtype=torch.uint8), torch.empty(5, dtype=torch.uint8)
    for wrong in ([5, 9], [5, 0], [-1]):
        with pytest.raises(ValueError, match="in the order of the file"):
            FileStream(str(path), way=way).read([(offset, five) for offset in wrong])
    with pytest.raises(OSError, match=f"'{path}' ends at byte {6 * BLOCK}"):
        FileStream(str(path), 0, 2, way, 3, 6).read([(6 * BLOCK - 1, two)])
    with pytest.raises(ValueError, match="in the order of the file"):
        FileStream(str(path), 0, 2, way, 3, 6).read([(3 * BLOCK - 1, two)])
    with pytest.raises(ValueError, match="contiguous tensor"):
        FileStream(str(path), way=way).read([(0, five[::2])])
    stream = FileStream(str(path), way=way)
    stream.read()
    with pytest.raises(ValueError, match="was read already"):
        stream.read()
    stream = FileStream(str(path), way=way)
    os.truncate(path, 4 * BLOCK)
    with pytest.raises(OSError, match=rf"'{path}' ends at byte \d+"):
        stream.read()


def test_one_that_nobody_reads_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, 12 * BLOCK)
    before = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0
    for ahead in (0, BLOCK, 20 * BLOCK):
        stream = FileStream(str(path), ahead)
        del stream
    if before:
        assert len(os.listdir("/proc/self/task")) == before
