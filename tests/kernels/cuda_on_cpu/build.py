"""Compiles the CUDA kernels for the CPU, together with what checks them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tests.kernels.cuda_on_cpu.launches import rewrite

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
COMPILER = "g++"
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
PLAIN = ("-O0",)


@dataclass(frozen=True)
class Fault:
    """A mistake that is put into a kernel: ``right`` becomes ``wrong`` in ``file``."""

    file: str
    right: str
    wrong: str


def compile_checks(folder: Path, flags: tuple[str, ...]) -> Path:
    """The program that runs all kernels and compares them, in ``folder``."""
    sources = sorted(HERE.glob("*.cpp")) + sorted((CSRC / "kernels" / "cuda").glob("*.cu"))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, flags), sources))
    return _link(objects, folder / "checks", flags)


def compile_with_fault(folder: Path, sound: Path, kernel: str, fault: Fault) -> Path:
    """The program in ``sound`` with ``kernel`` compiled anew, wrong, without sanitizers."""
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
    return _link([*others, changed], folder / "checks", PLAIN)


def _compile(source: Path, folder: Path, flags: tuple[str, ...]) -> Path:
    target = folder / f"{source.name}.o"
    if source.suffix == ".cu":
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
    libraries = Path(torch.__file__).parent / "lib"
    search = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10"]
    _run([COMPILER, *flags, *map(str, objects), *search, "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
