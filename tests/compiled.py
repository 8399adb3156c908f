"""Extension modules of tests, compiled once for each version of sources, torch and flags."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from tests.kept import kept

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
COMPILER = "g++"
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def has_compiler() -> bool:
    """Whether extension modules can be compiled here."""
    return shutil.which(COMPILER) is not None


@dataclass(frozen=True)
class Extension:
    """An extension module.

    Attributes:
        sources: paths from the root of the repository. They are compiled as one: reading torch's
            headers takes longer than the code that follows them.
    """

    name: str
    sources: tuple[str, ...]

    def compile(self) -> Path:
        """The module's file.

        Raises:
            RuntimeError: the compiler failed; its messages are included.
        """

        def compile_in(folder: Path) -> None:
            source = "".join(f'#include "{path}"\n' for path in self.sources)
            command = [*self._command(), "-o", str(folder / f"{self.name}.so")]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, input=source)
            if done.returncode != 0:
                raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")

        return kept(self.name, self._key(), compile_in) / f"{self.name}.so"

    def load(self) -> Any:
        """The module, the same one each time. Raises what :meth:`compile` does."""
        if self.name not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.name, self.compile())
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[self.name] = module
        return sys.modules[self.name]

    def _command(self) -> list[str]:
        libraries = Path(torch.__file__).parent / "lib"
        folders = [*include_paths(), sysconfig.get_path("include")]
        return [
            *(COMPILER, *_flags(), "-shared", "-w", "-x", "c++", "-", "-I.", "-Icsrc"),
            *(f"-isystem{folder}" for folder in folders),
            *(f"-DTORCH_EXTENSION_NAME={self.name}", "-DUSE_C10D_GLOO"),
            *(f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ]

    def _key(self) -> list[str]:
        """All that the module depends on."""
        texts = included_texts(ROOT / source for source in self.sources)
        compiler = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
        python = str(sysconfig.get_config_var("SOABI"))
        return [repr(self.sources), *texts, *_flags(), compiler, torch.__version__, python]


def _flags() -> list[str]:
    """`TEST_CXX_FLAGS` adds those of a sanitizer."""
    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden"]
    flags += ["--param", "ggc-min-heapsize=524288"]  # as setup.py
    return [*flags, *os.environ.get("TEST_CXX_FLAGS", "").split()]


def included_texts(sources: Iterable[Path]) -> list[str]:
    """Of the sources, and of all files of this repository that they include."""
    texts: dict[Path, str] = {}
    pending = list(sources)
    while pending:
        path = pending.pop().resolve()
        if path not in texts and path.exists():
            texts[path] = path.read_text()
            names = _INCLUDE.findall(texts[path])
            pending += [folder / name for name in names for folder in (path.parent, CSRC)]
    return [f"{os.path.relpath(path, ROOT)}\n{texts[path]}" for path in sorted(texts)]
