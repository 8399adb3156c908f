"""Reads of another process's memory."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.bindings import _C_testing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the system call")
NBYTES = 3 << 20
PROGRAM = f"""
import ctypes
memory = (ctypes.c_uint32 * {NBYTES // 4})(*range({NBYTES // 4}))
print(ctypes.addressof(memory), flush=True)
input()
"""


@dataclass
class Other:
    """A process with numbers in its memory."""

    process: subprocess.Popen[str]
    address: int


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    arguments = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        yield Other(process, int(process.stdout.readline()))
        process.stdin.write("\n")
        process.stdin.close()


EXPECTED = b"".join(number.to_bytes(4, sys.byteorder) for number in range(NBYTES // 4))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_pieces_come_in_their_order(other: Other, count: int) -> None:
    size = NBYTES // count
    parts = [(begin, size - begin % 3) for begin in range(0, count * size, size)][::-1]
    found = _C_testing.read_process(
        other.process.pid, [(other.address + begin, nbytes) for begin, nbytes in parts]
    )
    assert found == b"".join(EXPECTED[begin : begin + nbytes] for begin, nbytes in parts)
    assert _C_testing.read_process(other.process.pid, []) == b""


def test_what_is_not_there_is_an_error(other: Other) -> None:
    read = _C_testing.read_process
    assert read(other.process.pid, [(other.address, 8), (8, 8)]) == errno.EFAULT
    own = ctypes.create_string_buffer(b"own")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert read(ended.pid, [(ctypes.addressof(own), 3)]) == errno.ESRCH
