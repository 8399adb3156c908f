"""Imports the C++ extension, and raises ImportError if it was built for another torch."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

# csrc/bindings/module.cpp writes this text into `_C.build`; the file's bytes contain it, too.
_TORCH = re.compile(rb", torch (\d[^\s,]*), CUDA: ")
_REBUILD = "build it again in zerocore's source folder: pip install --no-build-isolation ."

_SOURCES = (
    "this zerocore is the source folder, without its C++ extension: run Python in another folder, "
    "or build it here with pip install --no-build-isolation -e ."
)


def mismatch(text: bytes) -> str | None:
    """Returns the error text if ``_C.build``, or the extension's file, names another torch; None
    if it fits or names none.

    Releases that differ only in the third number share their C++ interface.
    """
    match = _TORCH.search(text)
    built = torch.__version__ if match is None else match[1].decode()
    if built.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return (
        f"zerocore's C++ extension was built for torch {built}, and this is torch "
        f"{torch.__version__}; {_REBUILD}"
    )


def import_extension(folder: Path) -> None:
    """Imports ``zerocore._C`` from ``folder``; an ImportError names both torch versions."""
    try:
        from zerocore import _C
    except ImportError as error:
        files = [file for end in EXTENSION_SUFFIXES if (file := folder / f"_C{end}").exists()]
        if not files and (folder.parent / "setup.py").exists():
            raise ImportError(_SOURCES) from error
        if not files:
            raise ImportError(f"zerocore's C++ extension is missing; {_REBUILD}") from error
        wrong = mismatch(files[0].read_bytes())
        if wrong is not None:
            raise ImportError(wrong) from error
        raise
    wrong = mismatch(_C.build.encode())
    if wrong is not None:
        raise ImportError(wrong)


import_extension(Path(__file__).parent)
