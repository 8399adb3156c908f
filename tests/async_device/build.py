"""Compiles the device, once for each version of its sources, torch and flags."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
CACHE = HERE.parents[1] / "build" / "async_device"
COMPILER = "g++"
NAME = "async_device_extension"


def find_device() -> Path | None:
    """The compiled device of these sources, if it was compiled."""
    path = _target()
    return path if path.exists() else None


def compile_device() -> Path:
    """The extension module; takes a minute if it is not there yet.

    Raises:
        RuntimeError: the compiler failed; its messages are included.
    """
    target = _target()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{os.getpid()}.so")
    command = [*_command(), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, input=_unity())
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
    unfinished.replace(target)  # another process may have been as fast
    return target


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
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]


def _target() -> Path:
    sources = [*sorted(HERE.glob("*.[ch]*")), CSRC / "runtime" / "device_timer.h"]
    texts = [path.read_text() for path in sources]
    key = "\n".join([*texts, *_flags(), torch.__version__, str(sysconfig.get_config_var("SOABI"))])
    return CACHE / hashlib.sha256(key.encode()).hexdigest()[:16] / f"{NAME}.so"
