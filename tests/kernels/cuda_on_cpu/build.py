"""Compiles the CUDA kernels for the CPU, once for each version of all that is compiled."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tests.kept import kept
from tests.kernels.cuda_on_cpu.launches import rewrite

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
COMPILER = "g++"
LIBRARIES = Path(torch.__file__).parent / "lib"  # where a program finds torch's when it runs
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
PLAIN = ("-O0",)
# Kernels in PLAIN programs call a function of accesses.cpp at each access.
TRACED = (
    "-fsanitize=kernel-address",
    "--param=asan-instrumentation-with-call-threshold=0",
    "--param=asan-stack=0",
    "--param=asan-globals=0",
)
SOURCES = {".h", ".cuh", ".cu"}


@dataclass(frozen=True)
class Fault:
    """A mistake that is put into a kernel: ``right`` becomes ``wrong`` in ``file``."""

    file: str
    right: str
    wrong: str


def compile_checks(flags: tuple[str, ...]) -> Path:
    """The program that runs all kernels and compares them."""

    def compile_in(folder: Path) -> None:
        sources = sorted(HERE.glob("*.cpp")) + sorted((CSRC / "kernels" / "cuda").glob("*.cu"))
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda source: _compile(source, folder, flags), sources))
        _link(objects, folder / "checks", flags)

    return _program(compile_in, *flags)


def compile_with_fault(sound: Path, kernel: str, fault: Fault) -> Path:
    """The program in ``sound`` with ``kernel`` compiled anew, wrong, without sanitizers."""

    def compile_in(folder: Path) -> None:
        overlay = folder / "kernels" / "cuda"
        overlay.mkdir(parents=True)
        for source in (CSRC / "kernels" / "cuda").iterdir():
            shutil.copy(source, overlay)
        text = (overlay / fault.file).read_text()
        if fault.right not in text:
            raise ValueError(f"{fault.file} does not have {fault.right!r} any more")
        (overlay / fault.file).write_text(text.replace(fault.right, fault.wrong))
        changed = _compile(overlay / f"{kernel}.cu", folder, PLAIN)
        others = [each for each in sound.parent.glob("*.o") if each.name != changed.name]
        _link([*others, changed], folder / "checks", PLAIN)

    return _program(compile_in, *PLAIN, kernel, repr(fault))


def _program(compile_in: Callable[[Path], None], *how: str) -> Path:
    """The program of the same sources and options, compiled before or now."""
    return kept("cuda_on_cpu", [_sources_and_tools(), *how], compile_in) / "checks"


@cache
def _sources_and_tools() -> str:
    """All that a compiled program depends on, but for the flags."""
    here = sorted(path for path in HERE.rglob("*") if path.suffix in {".cpp", ".h", ".py"})
    folders = [CSRC / "common", CSRC / "kernels"]  # kernels include nothing else
    core = sorted(path for each in folders for path in each.rglob("*.*") if path.suffix in SOURCES)
    texts = [f"{path.name}\n{path.read_text()}" for path in (*here, *core)]
    compiler = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
    return "\n".join([*texts, compiler, torch.__version__])


def _compile(source: Path, folder: Path, flags: tuple[str, ...]) -> Path:
    target = folder / f"{source.name}.o"
    if source.suffix == ".cu":
        flags += TRACED if flags == PLAIN else ()
        rewritten = folder / f"{source.name}.cpp"
        rewritten.write_text('#include "cuda_on_cpu.h"\n' + rewrite(source.read_text()))
        source = rewritten
    folders = [folder, HERE / "shim", HERE, CSRC]
    command = [COMPILER, "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-w", *flags]
    command += [f"-I{each}" for each in folders]
    command += [f"-isystem{each}" for each in include_paths()]
    _run([*command, "-c", str(source), "-o", str(target)])
    return target


def _link(objects: list[Path], target: Path, flags: tuple[str, ...]) -> Path:
    _run([COMPILER, *flags, *map(str, objects), f"-L{LIBRARIES}", "-lc10", "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
