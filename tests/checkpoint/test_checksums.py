"""The list of checksums: what it takes, every block is compared once, and any range when read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.mutants import sums_signed
from zerocore._C import BLOCK_NBYTES, StreamWay
from zerocore.checkpoint.checked_reads import check_files, read_checked, read_range, read_sums
from zerocore.checkpoint.checksums import NAME, Checksums, FileSums

SIZES = {"a": 0, "b": 5, "c": 3 * BLOCK_NBYTES, "d": 2 * BLOCK_NBYTES + 17}


@pytest.fixture
def sums(tmp_path: Path) -> Checksums:
    choose, found = random.Random(1), Checksums()
    for name, nbytes in SIZES.items():
        data = choose.randbytes(nbytes)
        (tmp_path / name).write_bytes(data)
        found[name] = FileSums.of(data)
    return found


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(bytes(data))


def test_the_list_is_what_was_written(sums: Checksums, tmp_path: Path) -> None:
    assert read_sums(tmp_path) is None
    (tmp_path / NAME).write_bytes(sums.text())
    assert read_sums(tmp_path) == sums
    for place in range(0, len(sums.text()), 7):
        flip(tmp_path / NAME, place)
        with pytest.raises(ValueError, match=rf"{NAME} is damaged"):
            read_sums(tmp_path)
        flip(tmp_path / NAME, place)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"files": {"a": 5}, "crc32": {}, "values": {}}',
        b'{"block_nbytes": 4096, "files": {}}',
        b'{"block_nbytes": 2097152, "files": {"../a": {"nbytes": 0, "crc32": ""}}}',
        b'{"block_nbytes": 2097152, "files": {"a": {"nbytes": 1, "crc32": ""}}}',
        b'{"block_nbytes": 2097152, "files": {"a": {"nbytes": 1, "crc32": "0000000g"}}}',
        b'{"block_nbytes": 2097152, "files": {"a": {"nbytes": true, "crc32": "00000000"}}}',
        b'{"block_nbytes": 2097152, "files": {"a": {"nbytes": 2097153, "crc32": "00000000"}}}',
    ],
)
def test_forged_lists_are_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(sums_signed(text))
    with pytest.raises(ValueError, match=NAME):
        read_sums(tmp_path)


@pytest.mark.parametrize("way", [StreamWay.ANY, StreamWay.CACHED], ids=str)
def test_each_block_is_compared_by_one_part(
    way: StreamWay, sums: Checksums, tmp_path: Path
) -> None:
    asked: list[list[range]] = []

    def keys_in(name: str, ranges: list[range]) -> list[str]:
        asked.append(ranges)
        return ["the key"]

    done: list[int] = []
    for part in range(3):
        check_files(tmp_path, sums, part, 3, way, keys_in, done.append)
    assert sum(done) == sum(SIZES.values()) and not asked
    for name, place in [(n, at) for n, size in SIZES.items() for at in {0, size // 2, size - 1}]:
        if not 0 <= place < SIZES[name]:
            continue
        flip(tmp_path / name, place)
        found = 0
        for part in range(3):
            try:
                check_files(tmp_path, sums, part, 3, way, keys_in)
            except ValueError as error:
                assert f"{tmp_path / name} is damaged" in str(error) and "the key" in str(error)
                found += 1
        assert found == 1 and place in asked.pop()[0]
        flip(tmp_path / name, place)


def test_sizes_are_compared(sums: Checksums, tmp_path: Path) -> None:
    for name in SIZES:
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data + b"\0")
        with pytest.raises(ValueError, match=rf"{name} has"):
            check_files(tmp_path, sums)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            read_checked(tmp_path / name, sums)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{NAME} is damaged"):
        (tmp_path / NAME).write_bytes(b"")
        read_checked(tmp_path / NAME, sums)


def test_any_range_is_compared_when_it_is_read(sums: Checksums, tmp_path: Path) -> None:
    path, choose = tmp_path / "d", random.Random(2)
    data = path.read_bytes()
    for place in (None, 100, BLOCK_NBYTES, len(data) - 1):
        if place is not None:
            flip(path, place)
        for _ in range(20):
            begin, end = sorted(choose.sample(range(len(data) + 1), 2))
            blocks = range(begin // BLOCK_NBYTES, (end - 1) // BLOCK_NBYTES + 1)
            if place is not None and place // BLOCK_NBYTES in blocks:
                with pytest.raises(ValueError, match=r"d is damaged"):
                    read_range(path, sums["d"], begin, end - begin)
            else:
                assert read_range(path, sums["d"], begin, end - begin) == data[begin:end]
        if place is not None:
            flip(path, place)
    assert read_range(path, None, len(data) - 3, 9) == data[-3:]
    with pytest.raises(ValueError, match="a header or a plain value cannot have"):
        read_range(path, None, 0, 1 << 40)
