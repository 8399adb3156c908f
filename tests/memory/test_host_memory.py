"""One mapping of host memory: its size, its views, who keeps it."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from tests.distributed.scripts import run_program
from zerocore import _C
from zerocore._C import HostMemory

KIB = 1024


def mapped_kib(address: int) -> dict[str, int]:
    """Figures of the mapping that begins at an address, KiB; empty where there is none."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*\n((?:\w+:.*\n)+)", text, re.MULTILINE)
    return {name: int(n) for name, n in re.findall(r"(\w+):\s+(\d+) kB", found[1] if found else "")}


def test_the_mapping_has_the_size_that_was_asked_for() -> None:
    for nbytes in (1, 4096, 5 * 1024 * KIB + 3, 33 * 1024 * KIB):
        memory = HostMemory(nbytes)
        assert memory.nbytes == nbytes and memory.address % 4096 == 0
        found = mapped_kib(memory.address)
        assert found["Size"] == -(-nbytes // 4096) * 4 and found["Rss"] == 0
        view = memory.view(0, nbytes, torch.uint8)
        assert view.count_nonzero() == 0
        view.fill_(1)
        assert mapped_kib(memory.address)["Rss"] == found["Size"]
        del memory, view  # the system joins mappings that lie side by side


def test_views_share_the_memory_and_keep_it() -> None:
    memory = HostMemory(64 * KIB)
    words = memory.view(8, 4, torch.float32)
    memory.view(8, 16, torch.uint8).copy_(torch.arange(4, dtype=torch.float32).view(torch.uint8))
    address = memory.address
    assert words.tolist() == [0, 1, 2, 3] and words.data_ptr() == address + 8
    del memory
    gc.collect()
    assert words.tolist() == [0, 1, 2, 3] and mapped_kib(address)["Size"] == 64
    del words
    assert mapped_kib(address).get("Size") != 64


def test_views_are_within_the_memory() -> None:
    memory = HostMemory(64)
    assert memory.view(64, 0, torch.float32).numel() == 0
    assert HostMemory(0).view(0, 0, torch.float32).numel() == 0
    for offset, numel in ((2, 1), (-4, 1), (0, 17), (60, 2), (68, 0), (0, -1), (4, 2**61)):
        with pytest.raises(ValueError, match=r"host memory of 64 bytes has no view of"):
            memory.view(offset, numel, torch.float32)
    with pytest.raises(ValueError, match="0 bytes or more, got -1"):
        HostMemory(-1)
    with pytest.raises(ValueError, match="64 bytes: 65 of them cannot be pinned"):
        HostMemory(64, pinned_nbytes=65)


@pytest.mark.skipif(_C.HAS_CUDA_KERNELS, reason="this build pins")
def test_a_build_without_cuda_pins_nothing() -> None:
    assert HostMemory(64).pinned_nbytes == 0
    with pytest.raises(RuntimeError, match="needs a build with CUDA"):
        HostMemory(64, pinned_nbytes=16)


@pytest.mark.parametrize("inherited", [False, True])
def test_the_child_of_a_fork_has_a_copy_where_it_may(inherited: bool) -> None:
    memory = HostMemory(64 * KIB, inherited=inherited)
    view = memory.view(0, 64 * KIB, torch.uint8).fill_(1)
    child = os.fork()
    if child == 0:
        has_memory = mapped_kib(memory.address) != {}
        if has_memory:
            view[0] += 1
        os._exit(int(has_memory != inherited))
    assert os.waitpid(child, 0)[1] == 0
    assert view[0].item() == 1


LIMITED = """
import resource
from zerocore._C import HostMemory
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
HostMemory(1 << 20)
try:
    HostMemory(2 << 30)
except RuntimeError as error:
    print(error)
"""


def test_a_limit_is_an_error() -> None:
    ((code, output),) = run_program(LIMITED, 1)
    assert code == 0, output
    assert "cannot map 2147483648 bytes of host memory: Cannot allocate memory" in output
