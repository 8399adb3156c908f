"""Compiles the device, once for each version of its sources, torch and flags."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tests.kept import kept

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = "g++"
NAME = "async_device_extension"


def compile_device() -> Path:
    """The extension module, which needs torch to be imported; takes half a minute at first.

    Raises:
        RuntimeError: the compiler failed; its messages are included.
    """

    def compile_in(folder: Path) -> None:
        command = [*_command(), "-o", str(folder / f"{NAME}.so")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, input=_unity())
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")

    return kept("async_device", _key(), compile_in) / f"{NAME}.so"


def has_compiler() -> bool:
    """Whether the device can be compiled here."""
    return shutil.which(COMPILER) is not None


def _flags() -> list[str]:
    """`ASYNC_DEVICE_FLAGS` adds those of a sanitizer."""
    return ["-std=c++20", "-O1", "-fPIC", *os.environ.get("ASYNC_DEVICE_FLAGS", "").split()]


def _unity() -> str:
    """One source: reading torch's headers takes longer than what follows them."""
    return "".join(f'#include "{path.name}"\n' for path in sorted(HERE.glob("*.cpp")))


def _command() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    folders = [*include_paths(), sysconfig.get_path("include")]
    return [
        *(COMPILER, *_flags(), "-shared", "-w", "-x", "c++", "-", f"-I{HERE}", f"-I{CSRC}"),
        *(f"-isystem{folder}" for folder in folders),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_C10D_GLOO"),
        *(f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]


def _key() -> list[str]:
    """All that the module depends on."""
    sources = [*sorted(HERE.glob("*.[ch]*")), CSRC / "emulation" / "device_timer.h"]
    texts = [path.read_text() for path in sources]
    compiler = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
    return [*texts, *_flags(), compiler, torch.__version__, str(sysconfig.get_config_var("SOABI"))]
