"""What nvcc makes of the CUDA kernels: their accesses of memory, registers and spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).parents[2] / "csrc"
ARCH = "sm_90"
WIDE = 16  # bytes of the widest access
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z:_0-9]+?)*?(?:\.v(\d))?\.[busf](\d+)\b")
_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel: ``copy_kernel<float, float, 128>``.

    ``loads`` and ``stores`` of global memory are counted by their bytes.
    """

    name: str
    loads: Counter[int]
    stores: Counter[int]
    registers: int
    spilled_nbytes: int


def has_compiler() -> bool:
    """Whether kernels can be compiled here."""
    return all(shutil.which(tool) for tool in ("nvcc", "ptxas", "c++filt"))


def compile_ptx(source: Path, target: Path) -> Path:
    """Takes some 6 seconds.

    Raises:
        RuntimeError: nvcc failed; its messages are included.
    """
    folders = [f"-isystem={each}" for each in include_paths()]
    _run(
        *("nvcc", "-std=c++20", "-O3", f"-arch={ARCH}", "--ptx", f"-I{CSRC}", *folders),
        *("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-o", str(target), str(source)),
    )
    return target


def read_kernels(ptx: Path, *options: str) -> list[Kernel]:
    """The kernels of a file, as ptxas compiles it with ``options``.

    Raises:
        RuntimeError: ptxas failed; its messages are included.
    """
    output = _run("ptxas", "-v", f"-arch={ARCH}", *options, str(ptx), "-o", str(ptx) + ".cubin")
    usage = {name: tuple(map(int, figures)) for name, *figures in _USAGE.findall(output)}
    kernels = []
    for body in ptx.read_text().split(".entry ")[1:]:
        mangled = body[: body.index("(")].strip()
        stored, loaded, registers = usage[mangled]
        accesses = {"ld": Counter[int](), "st": Counter[int]()}
        for operation, lanes, bits in _ACCESS.findall(body):
            accesses[operation][int(lanes or 1) * int(bits) // 8] += 1
        kernels.append(
            Kernel(_readable(mangled), accesses["ld"], accesses["st"], registers, stored + loaded)
        )
    return kernels


def _readable(mangled: str) -> str:
    name = _run("c++filt", mangled).strip().replace("(anonymous namespace)::", "")
    return re.sub(r"^void |zerocore::(kernels::)?(cuda::)?|c10::", "", name).split("(")[0]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr
