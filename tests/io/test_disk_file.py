"""Files to swap with: bytes come back, errors name what failed, nothing is left behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bindings import _C_testing
from tests.distributed.scripts import run_program
from zerocore._C import HostMemory

MIB = 1 << 20
NUM_UNDER_WAY = 64  # blocks of 4 MiB, csrc/io/disk_file.cpp


def random_bytes(nbytes: int) -> Tensor:
    """Memory that begins on a page."""
    memory = HostMemory(nbytes).view(0, nbytes, torch.uint8)
    return memory.random_()


def test_bytes_come_back(tmp_path: Path) -> None:
    """Requests of all sizes, more than can be under way, waited for in any order."""
    sizes = [1, 2, 3, 1023, 1024, 1025, 3000, *[1] * (3 * NUM_UNDER_WAY)]
    ends = torch.tensor(sizes).cumsum(0).mul(_C_testing.DISK_ALIGNMENT).tolist()
    ranges = list(zip([0, *ends], ends, strict=False))
    random.Random(0).shuffle(ranges)
    source, found = random_bytes(ends[-1]), random_bytes(ends[-1])
    file = _C_testing.DiskFile(str(tmp_path), "states", ends[-1])
    assert file.nbytes == ends[-1]
    for begin, memory in ((file.write, source), (file.read, found)):
        tickets = [begin(a, memory[a:b], "a unit") for a, b in ranges]
        for ticket in random.Random(1).sample(tickets, len(tickets)):
            file.wait(ticket)
    assert torch.equal(source, found)
    with pytest.raises(ValueError, match="was waited for"):
        file.wait(tickets[0])


def test_several_threads(tmp_path: Path) -> None:
    nbytes, num_threads = 6 * MIB, 4
    source, found = (random_bytes(num_threads * nbytes) for _ in range(2))
    file = _C_testing.DiskFile(str(tmp_path), "states", num_threads * nbytes)

    def round_trip(thread: int) -> None:
        begin = thread * nbytes
        for _ in range(5):
            file.wait(file.write(begin, source[begin:][:nbytes], "x"))
            file.wait(file.read(begin, found[begin:][:nbytes], "x"))

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(round_trip, range(num_threads)))
    assert torch.equal(source, found)


def replace_by(path: str) -> Callable[[_C_testing.DiskFile], None]:
    """Makes the file's descriptor that of another one."""

    def replace(file: _C_testing.DiskFile) -> None:
        other = os.open(path, os.O_RDWR)
        os.dup2(other, file.descriptor)
        os.close(other)

    return replace


def cut_off(file: _C_testing.DiskFile) -> None:
    """In the middle of a page of its second block."""
    os.truncate(f"/proc/self/fd/{file.descriptor}", 4 * MIB + 100)


@pytest.mark.parametrize(
    ("damage", "request_name", "code", "offset"),
    [
        (replace_by("/dev/full"), "write", errno.ENOSPC, 0),
        (replace_by("/proc/self/mem"), "read", errno.EIO, 0),  # nothing is mapped at 0
        (cut_off, "read", errno.ENODATA, 4 * MIB),
    ],
)
def test_errors_name_file_and_unit(
    damage: Callable[[_C_testing.DiskFile], None],
    request_name: str,
    code: int,
    offset: int,
    tmp_path: Path,
) -> None:
    memory = random_bytes(8 * MIB)
    file = _C_testing.DiskFile(str(tmp_path), "states", 8 * MIB)
    damage(file)
    ticket = getattr(file, request_name)(0, memory, "unit 'blocks.3'")
    with pytest.raises(OSError, match=r"unit 'blocks\.3'") as caught:
        file.wait(ticket)
    assert caught.value.errno == code
    said = str(caught.value)
    assert f"cannot {request_name}" in said and file.path in said
    if code != errno.ENOSPC and request_name == "read":  # blocks of /dev/full fail in any order
        assert f"at byte {offset} " in said


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"has \d+ bytes free, 1125899906842624 are wanted") as caught:
        _C_testing.DiskFile(str(tmp_path), "states", 1 << 50)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
    with pytest.raises(FileNotFoundError, match="nowhere/states"):
        _C_testing.DiskFile(str(tmp_path / "nowhere"), "states", _C_testing.DISK_ALIGNMENT)
    assert list(tmp_path.iterdir()) == []


def test_space_is_reserved(tmp_path: Path) -> None:
    file = _C_testing.DiskFile(str(tmp_path), "states", 3 * MIB)
    status = os.fstat(file.descriptor)
    assert status.st_size == 3 * MIB and status.st_blocks * 512 >= 3 * MIB
    assert status.st_nlink == 0


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    memory, page = random_bytes(8 * _C_testing.DISK_ALIGNMENT), _C_testing.DISK_ALIGNMENT
    file = _C_testing.DiskFile(str(tmp_path), "states", 4 * page)
    for offset, begin, nbytes in (
        (1, 0, page),
        (0, 8, page),
        (0, 0, page - 1),
        (0, 0, 0),
        (0, 0, 5 * page),
        (4 * page, 0, page),
        (-page, 0, page),
    ):
        with pytest.raises(ValueError, match=r"states.*a unit"):
            file.read(offset, memory[begin:][:nbytes], "a unit")
    with pytest.raises(ValueError, match="multiple of 4096 bytes, got 5"):
        _C_testing.DiskFile(str(tmp_path), "states", 5)


def test_a_folder_that_is_removed_takes_nothing_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    source, found = random_bytes(MIB), random_bytes(MIB)
    file = _C_testing.DiskFile(str(folder), "states", MIB)
    file.wait(file.write(0, source, "x"))
    shutil.rmtree(folder)
    file.wait(file.read(0, found, "x"))
    assert torch.equal(source, found)


KILLED = """
import os, signal, sys, torch
from tests.bindings._C_testing import DiskFile
from zerocore._C import HostMemory
memory = HostMemory(64 << 20)
file = DiskFile(sys.argv[1], "states", memory.nbytes)
file.write(0, memory.view(0, memory.nbytes, torch.uint8), "x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    ((code, output),) = run_program(KILLED, 1, str(tmp_path))
    assert code == -signal.SIGKILL, output
    assert list(tmp_path.iterdir()) == []
