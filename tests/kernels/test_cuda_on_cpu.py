"""The CUDA kernels, run on the CPU: values, memory, addresses and barriers; not speed or races.

AddressSanitizer sees every access outside of a tensor, UndefinedBehaviorSanitizer every one at an
address that a GPU refuses. The threads of a block run in three orders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.cuda_on_cpu.build import (
    COMPILER,
    LIBRARIES,
    PLAIN,
    SANITIZED,
    Fault,
    compile_checks,
    compile_with_fault,
)
from tests.kernels.cuda_on_cpu.launches import rewrite

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # of which compiling takes most
]
WHAT = ("copies", "sums", "norms", "scaled", "adamw")
COUNT = "first + u * kThreads < count"
FAR_APART = "static_cast<int>(threadIdx.x % 16 * 16 + threadIdx.x / 16)"
FAULTS = {
    "threads that follow each other copy far apart": (
        "copy",
        "sectors",
        Fault("vector.cuh", "first = static_cast<int>(threadIdx.x)", f"first = {FAR_APART}"),
    ),
    "threads that follow each other update far apart": (
        "adamw",
        "sectors",
        Fault("adamw.cu", "i = static_cast<int>(threadIdx.x)", f"i = {FAR_APART}"),
    ),
    "a loop is one too long": (
        "copy",
        "copies",
        Fault("vector.cuh", COUNT, "first + u * kThreads <= count"),
    ),
    "the tail is lost": (
        "copy",
        "copies",
        Fault(
            "vector.cuh",
            "map_groups<1, reads_dst>(dst + past",
            "if (false) map_groups<1, reads_dst>(dst + past",
        ),
    ),
    "a warp misses the largest of its lanes": (
        "scaled",
        "scaled",
        Fault("scaled.cu", "kWarp / 2; lanes > 0", "kWarp / 4; lanes > 0"),
    ),
    "a block does not wait for its sums": (
        "grad_norm",
        "norms",
        Fault("grad_norm.cu", "__syncthreads();", ""),
    ),
    "a block does not wait for its factors": (
        "adamw",
        "adamw",
        Fault("adamw.cu", "__syncthreads();", ""),
    ),
    "only some threads wait": (
        "adamw",
        "adamw",
        Fault("adamw.cu", "__syncthreads();", "if (threadIdx.x != 7) __syncthreads();"),
    ),
    "the second table begins at the first chunk": (
        "grad_norm",
        "norms",
        Fault("grad_norm.cu", "call.partials + call.segments[begin].first_chunk", "call.partials"),
    ),
}


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return compile_checks(SANITIZED)


@pytest.fixture(scope="module")
def plain() -> Path:
    return compile_checks(PLAIN)


def run(program: Path, what: str) -> subprocess.CompletedProcess[str]:
    folders = {"LD_LIBRARY_PATH": str(LIBRARIES)}
    return subprocess.run(
        [program, what], capture_output=True, text=True, timeout=300, env={**os.environ, **folders}
    )


@pytest.mark.parametrize("what", WHAT)
def test_kernels_do_what_plain_loops_do(sanitized: Path, what: str) -> None:
    done = run(sanitized, what)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split(" checks")[0]) > 100


def test_warps_access_whole_sectors(plain: Path) -> None:
    done = run(plain, "sectors")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", FAULTS)
def test_mistakes_are_found(plain: Path, name: str) -> None:
    kernel, what, fault = FAULTS[name]
    done = run(compile_with_fault(plain, kernel, fault), what)
    assert done.returncode != 0


def test_launches() -> None:
    source = "void f() {\n  g<int, 3><<<a + 1, b, 0, stream>>>(x, h(y));\n}"
    launch = "cuda_on_cpu::launch(a + 1,  b, [&] { g<int, 3>(x, h(y)); });"
    assert rewrite(source) == f"void f() {{ {launch}\n}}"
    with pytest.raises(ValueError, match="another form"):
        rewrite("{ g<<<1, 2>>>(); }")
