"""Files that are written in blocks: bytes in any order, checksums, ways, and what goes wrong."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zerocore._C import FileWriter, StreamWay

BLOCK = 2 << 20
RING = FileWriter.RING_NBYTES


@contextmanager
def created(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        yield file
    finally:
        os.close(file)


@pytest.fixture(params=[StreamWay.CACHED, StreamWay.DIRECT], ids=["cached", "direct"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> StreamWay:
    if request.param == StreamWay.DIRECT:
        require_direct(tmp_path)
    chosen: StreamWay = request.param
    return chosen


def require_direct(folder: Path) -> None:
    try:
        with created(folder / "probe") as file:
            FileWriter(file, 1, StreamWay.DIRECT)
    except OSError:
        pytest.skip("the file system has no writes past the page cache")


def random_bytes(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def random_parts(nbytes: int, seed: int) -> list[tuple[int, int]]:
    choose, parts, at = random.Random(seed), [], 0
    while at < nbytes:
        size = choose.choice([1, 63, 4096, 70_001, BLOCK, BLOCK + 17, 3 * BLOCK])
        parts.append((at, min(size, nbytes - at)))
        at += size
    choose.shuffle(parts)
    return parts


@pytest.mark.parametrize("nbytes", [0, 1, 4096, BLOCK, BLOCK + 4097, RING + 3 * BLOCK + 5])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bytes_in_any_order(num_threads: int, nbytes: int, way: StreamWay, tmp_path: Path) -> None:
    data = random_bytes(nbytes)
    with created(tmp_path / "file") as file:
        writer = FileWriter(file, nbytes, way)
        assert writer.is_direct == (way == StreamWay.DIRECT)

        def give(part: tuple[int, int]) -> int:
            return writer.write(data[part[0] :][: part[1]], part[0], 5)

        parts = random_parts(nbytes, num_threads)
        with ThreadPoolExecutor(num_threads) as pool:
            sums = list(pool.map(give, parts))
        writer.finish()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    expected = [zlib.crc32(data[at : at + size].numpy().tobytes(), 5) for at, size in parts]
    assert sums == expected
    assert writer.sums() == block_sums(data)


def block_sums(data: torch.Tensor) -> list[int]:
    return [zlib.crc32(block.numpy().tobytes()) for block in data.split(BLOCK) if len(data)]


def test_sums_of_writers_that_share_a_file(tmp_path: Path) -> None:
    data = random_bytes(3 * BLOCK + 4097)
    with created(tmp_path / "file") as file:
        writers = [FileWriter(file, data.nbytes, StreamWay.CACHED) for _ in range(3)]
        for index, (at, size) in enumerate(random_parts(data.nbytes, 8)):
            writers[index % 3].write(data[at : at + size], at)
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    parts = zip(*(writer.sums() for writer in writers), strict=True)
    assert [a ^ b ^ c for a, b, c in parts] == block_sums(data)


def test_more_blocks_wait_for_their_bytes_than_the_ring_has(tmp_path: Path) -> None:
    require_direct(tmp_path)
    num_blocks = RING // BLOCK + 5
    data = random_bytes(num_blocks * BLOCK)
    with created(tmp_path / "file") as file:
        writer = FileWriter(file, data.nbytes, StreamWay.DIRECT)
        for begin, end in ((1, BLOCK), (0, 1)):  # the first bytes of all come last
            for at in range(0, data.nbytes, BLOCK):
                writer.write(data[at + begin : at + end], at + begin)
        writer.finish()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_only_large_files_go_past_the_cache_unasked(tmp_path: Path) -> None:
    require_direct(tmp_path)
    with created(tmp_path / "file") as file:
        assert not FileWriter(file, RING).is_direct
        assert FileWriter(file, RING + 1).is_direct


def test_wrong_calls(way: StreamWay, tmp_path: Path) -> None:
    data = random_bytes(10)
    with created(tmp_path / "file") as file:
        writer = FileWriter(file, 10, way)
        for nbytes, offset in ((10, 1), (1, -1), (1, 10)):
            with pytest.raises(ValueError, match="not within a file of 10"):
                writer.write(data[:nbytes], offset)
        with pytest.raises(ValueError, match="contiguous tensor"):
            writer.write(data[::2], 0)
        writer.write(data[:4], 0)
        if way == StreamWay.DIRECT:
            with pytest.raises(
                ValueError, match="6 bytes are missing in the block that begins at byte 0"
            ):
                writer.finish()
    with pytest.raises(OSError, match="cannot duplicate the descriptor"):
        FileWriter(-1, 10, way)


def test_what_the_system_refuses_is_raised_and_ends(way: StreamWay, tmp_path: Path) -> None:
    data = random_bytes(4 * BLOCK)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limits[1]))
    try:
        with created(tmp_path / "file") as file:
            writer = FileWriter(file, data.nbytes, way)
            with pytest.raises(OSError, match="write") as caught:
                for at in range(0, data.nbytes, BLOCK):
                    writer.write(data[at : at + BLOCK], at)
                writer.finish()
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_the_callers_descriptor_may_be_closed(way: StreamWay, tmp_path: Path) -> None:
    data = random_bytes(3 * BLOCK + 1)
    with created(tmp_path / "file") as file:
        writer = FileWriter(file, data.nbytes, way)
    writer.write(data, 0)
    writer.finish()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
