"""The PTX of the CUDA kernels: their accesses of memory, registers and spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tests.compiled import included_texts
from tests.kept import kept

CSRC = Path(__file__).parents[2] / "csrc"
ARCH = "sm_90"
WIDE = 16  # bytes of the widest access
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z:_0-9]+?)*?(?:\.v(\d))?\.[busf](\d+)\b")
_SECOND_WORD = re.compile(r"\bst\.global\.v\S+\s+\[%rd\d+\+16\]")
_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel: ``copy_kernel<float, float, 128>``.

    ``loads`` and ``stores`` of global memory are counted by their bytes. ``most_ahead`` is the
    largest number of loads between two stores. ``second_words`` counts stores of the second word of
    a group: the words of a warp's lanes then have gaps between them.
    """

    name: str
    loads: Counter[int]
    stores: Counter[int]
    most_ahead: int
    second_words: int
    registers: int
    spilled_nbytes: int


def has_compiler() -> bool:
    """Whether kernels can be compiled here."""
    return all(shutil.which(tool) for tool in ("nvcc", "ptxas", "c++filt"))


def compile_ptx(source: Path, target: Path) -> Path:
    """Takes some 6 seconds; what was compiled before is kept.

    Raises:
        RuntimeError: nvcc failed; its messages are included.
    """
    folders = [f"-isystem={each}" for each in include_paths()]
    options = (
        "-std=c++20",
        "-O3",
        "-fmad=false",
        f"-arch={ARCH}",
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
    )
    command = ["nvcc", *options, f"-I{CSRC}", *folders, str(source)]

    def compile_now() -> str:
        _run(*command, "--ptx", "-o", str(target))
        return target.read_text()

    texts = [each.partition("\n")[2] for each in included_texts([source])]
    texts = [each.replace(f"{source.parent}/", "") for each in texts]
    target.write_text(_kept(["nvcc", *options, torch.__version__, *texts], compile_now))
    return target


def _kept(key: list[str], make: Callable[[], str]) -> str:
    """The output of `make` for this key, the name of a tool first, from before or made now."""
    words = [_run(key[0], "--version"), *key]
    folder = kept("ptx", words, lambda folder: (folder / "output").write_text(make()))
    return (folder / "output").read_text()


def read_kernels(ptx: Path, *options: str) -> list[Kernel]:
    """The kernels of a file, as ptxas compiles it with ``options``.

    Raises:
        RuntimeError: ptxas failed; its messages are included.
    """
    command = ["ptxas", "-v", f"-arch={ARCH}", *options]
    output = _kept(
        [*command, ptx.read_text()], lambda: _run(*command, str(ptx), "-o", str(ptx) + ".cubin")
    )
    usage = {name: tuple(map(int, figures)) for name, *figures in _USAGE.findall(output)}
    kernels = []
    bodies = {body[: body.index("(")].strip(): body for body in _entries(ptx)}
    names = _run("c++filt", *bodies).splitlines()
    for (mangled, body), name in zip(bodies.items(), names, strict=True):
        stored, loaded, registers = usage[mangled]
        accesses = {"ld": Counter[int](), "st": Counter[int]()}
        ahead, most_ahead = 0, 0
        for operation, lanes, bits in _ACCESS.findall(body):
            accesses[operation][int(lanes or 1) * int(bits) // 8] += 1
            ahead = ahead + 1 if operation == "ld" else 0
            most_ahead = max(most_ahead, ahead)
        second_words = len(_SECOND_WORD.findall(body))
        counts = accesses["ld"], accesses["st"], most_ahead, second_words
        kernels.append(Kernel(_short(name), *counts, registers, stored + loaded))
    return kernels


def _entries(ptx: Path) -> list[str]:
    return ptx.read_text().split(".entry ")[1:]


def _short(name: str) -> str:
    name = name.replace("(anonymous namespace)::", "")
    return re.sub(r"^void |zerocore::(kernels::)?(cuda::)?|c10::", "", name).split("(")[0]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr
