"""setuptools' build backend, which compiles against the torch of the environment.

pip builds in an environment of its own. With a torch there that is not the one that zerocore will
run with, the extension would not load; so where the Python that pip runs in has a suitable torch,
that one is used, and nothing is downloaded. Elsewhere pip fetches one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all hooks; those below are ours

ANY_TORCH = "torch>=2.11,<2.16"
_FIND = """
import os, torch
release = tuple(map(int, torch.__version__.split(".")[:2]))
if (2, 11) <= release < (2, 16):
    print(os.path.dirname(os.path.dirname(torch.__file__)))
"""


def torch_folder() -> str | None:
    """The folder in which the environment around the build has a suitable torch."""
    # Isolated: not what pip puts on PYTHONPATH, which hides the environment's own packages.
    found = subprocess.run(
        [sys.executable, "-I", "-c", _FIND], capture_output=True, text=True, check=False
    )
    lines = found.stdout.split("\n")
    return lines[-2] if found.returncode == 0 and len(lines) > 1 else None


def _requires(asked: list[str]) -> list[str]:
    return asked if torch_folder() else [*asked, ANY_TORCH]


def _show_torch() -> None:
    """Makes ``import torch`` in setup.py that of the environment, behind what pip has installed."""
    folder = torch_folder()
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
        paths = [os.environ.get("PYTHONPATH", ""), folder]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Needs of the build beside pyproject.toml's; without running setup.py, which needs torch."""
    return _requires([])


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(*args: Any) -> str:
    """As setuptools'."""
    _show_torch()
    return build_meta.prepare_metadata_for_build_wheel(*args)


def prepare_metadata_for_build_editable(*args: Any) -> str:
    """As setuptools'."""
    _show_torch()
    return build_meta.prepare_metadata_for_build_editable(*args)


def build_wheel(*args: Any) -> str:
    """As setuptools'."""
    _show_torch()
    return build_meta.build_wheel(*args)


def build_editable(*args: Any) -> str:
    """As setuptools'."""
    _show_torch()
    return build_meta.build_editable(*args)


def build_sdist(*args: Any) -> str:
    """As setuptools'."""
    _show_torch()
    return build_meta.build_sdist(*args)
