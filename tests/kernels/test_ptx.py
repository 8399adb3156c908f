"""The compiled CUDA kernels: 16-byte accesses, no spills, few registers. Says nothing of times."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.by_night import by_day
from tests.kernels.ptx import CSRC, WIDE, Kernel, compile_ptx, has_compiler, read_kernels

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no nvcc on this machine")

KERNELS = CSRC / "kernels" / "cuda"


class Limits(NamedTuple):
    """At least so many wide accesses and loads before a store, at most so many registers."""

    loads: int
    stores: int
    registers: int
    ahead: int = 0


# Of 65,536 registers, 64 for each of 256 threads leave room for 4 blocks: half of the threads that
# an SM may have, with 64 bytes or more of each in flight.
LIMITS = {
    "copy_kernel": Limits(4, 4, 64),
    "accumulate_kernel": Limits(6, 1, 40),
    "adamw_kernel": Limits(6, 6, 64),
    "square_kernel": Limits(4, 0, 48),
    "encode_kernel": Limits(0, 0, 40),  # words of 4 bytes follow each other within blocks
    "decode_kernel": Limits(0, 0, 64, ahead=16),  # eight words of numbers and their scales
    "advance_kernel": Limits(0, 0, 32),
    "total_kernel": Limits(0, 0, 32),
    # They do next to nothing: of what they hold, registers are to be left to others.
    "book_kernel": Limits(0, 0, 16),
    "hold_kernel": Limits(0, 0, 16),
}
SOURCES = {
    KERNELS / "copy.cu": ["copy_kernel"],
    KERNELS / "accumulate.cu": ["accumulate_kernel"],
    KERNELS / "adamw.cu": ["adamw_kernel", "advance_kernel"],
    KERNELS / "scaled.cu": ["encode_kernel", "decode_kernel"],
    KERNELS / "grad_norm.cu": ["square_kernel", "total_kernel"],
    CSRC / "emulation" / "emulated_timer.cu": ["book_kernel", "hold_kernel"],
}

BY_DAY = KERNELS / "adamw.cu"  # it needs most registers; nvcc takes seconds for each


def num_wide(accesses: Counter[int], kernel: Kernel) -> int:
    """Accesses of 16 bytes; of 8, too, where one dtype is half as wide as the other."""
    is_mixed = re.search(r"<float, (Half|BFloat16)|<(Half|BFloat16), float", kernel.name)
    return accesses[WIDE] + (accesses[WIDE // 2] if is_mixed else 0)


def faults_of(kernel: Kernel) -> list[str]:
    """The faults of a kernel, in words."""
    family = kernel.name.split("<")[0]
    limits = LIMITS[family]
    if family == "accumulate_kernel" and kernel.name.endswith(", 1>"):
        limits = limits._replace(loads=0, stores=0)  # the way of addresses that are not aligned
    wrong = []
    loads, stores = num_wide(kernel.loads, kernel), num_wide(kernel.stores, kernel)
    if loads < limits.loads or stores < limits.stores:
        wrong.append("few wide accesses")
    if kernel.most_ahead < limits.ahead:
        wrong.append("few loads in flight")
    if kernel.second_words > 0:
        wrong.append("a thread stores several words of a row")
    if kernel.registers > limits.registers:
        wrong.append("many registers")
    if kernel.spilled_nbytes > 0:
        wrong.append("spills")
    return [f"{kernel.name}: {each} ({kernel})" for each in wrong]


@pytest.mark.parametrize(
    "source",
    by_day(SOURCES, [BY_DAY]),
    ids=lambda path: path.stem,
)
def test_kernels_are_compiled_well(source: Path, tmp_path: Path) -> None:
    kernels = read_kernels(compile_ptx(source, tmp_path / "kernels.ptx"))
    families = {kernel.name.split("<")[0] for kernel in kernels}
    assert families == set(SOURCES[source])
    assert [fault for kernel in kernels for fault in faults_of(kernel)] == []


@pytest.mark.nightly
def test_worse_kernels_are_found(tmp_path: Path) -> None:
    """Vectors that are not aligned are read by the element; too many blocks make kernels spill."""
    folder = tmp_path / "kernels" / "cuda"
    folder.mkdir(parents=True)
    worse = {
        "alignas(sizeof(T) * lanes < kVectorNbytes ? sizeof(T) * lanes : kVectorNbytes)": "",
        "__launch_bounds__(kThreads)": "__launch_bounds__(kThreads, 8)",
        '"kernels/cuda/': f'"{folder}/',
    }
    texts = [(KERNELS / name).read_text() for name in ("grad_norm.cu", "vector.cuh")]
    assert all(any(right in text for text in texts) for right in worse)
    for name in ("grad_norm.cu", "vector.cuh", "table.cuh", "loops.h"):
        text = (KERNELS / name).read_text()
        for right, wrong in worse.items():
            text = text.replace(right, wrong)
        (folder / name).write_text(text)
    kernels = read_kernels(compile_ptx(folder / "grad_norm.cu", tmp_path / "kernels.ptx"))
    squares = [faults_of(each) for each in kernels if each.name.startswith("square_kernel")]
    assert squares and all("few wide accesses" in faults[0] for faults in squares)
    assert any("spills" in fault for faults in squares for fault in faults)
