"""An extension that was built for another torch is an ImportError that names both versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerocore
from zerocore import _C
from zerocore.extension import import_extension, mismatch


def import_with(folder: Path, extension: bytes) -> str:
    """The last line of the error of `import zerocore` with a file in place of the extension."""
    package = folder / "zerocore"
    source = Path(_C.__file__)
    shutil.copytree(source.parent, package, ignore=shutil.ignore_patterns("_C.*.so"))
    (package / source.name).write_bytes(extension)
    command = [sys.executable, "-c", "import zerocore"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("built", ["1.2.3", "2.99.0a0+git1234"])
def test_an_extension_for_another_torch(tmp_path: Path, built: str) -> None:
    text = b"\0\x7fELF\xff\0GCC 1.2, torch %s, CUDA: no kernels, C++ flags: -O3\0" % built.encode()
    error = import_with(tmp_path, text)
    assert error.startswith("ImportError: ")
    for part in (f"built for torch {built}", f"torch {torch.__version__}", "--no-build-isolation"):
        assert part in error


def test_an_extension_that_is_missing_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "built for" not in import_with(tmp_path, b"nothing")
    monkeypatch.delattr(zerocore, "_C")
    monkeypatch.setitem(sys.modules, "zerocore._C", None)
    with pytest.raises(ImportError, match=r"is missing; build it(?s:.*)--no-build-isolation"):
        import_extension(tmp_path)
    (tmp_path / "setup.py").touch()  # a reader's shell is in the folder that pip has built from
    with pytest.raises(ImportError, match=r"is the source folder(?s:.*)another folder"):
        import_extension(tmp_path / "sources")


def test_a_wrong_keyword_is_named() -> None:
    """Of a struct that Python makes by keyword."""
    cases: list[tuple[type, tuple[object, ...], dict[str, object], str]] = [
        (_C.ShardOptions, (), {"prefetch": 2}, "needs 'stage'"),
        (_C.ShardOptions, (), {"stage": 3, "stages": 2}, "has no argument 'stages'"),
        (_C.ShardOptions, (), {"stage": "3"}, "has a value of another type for 'stage'"),
        (_C.ShardOptions, (), {"stage": 3, "states": "gpu"}, "of another type for 'states'"),
        (_C.ParamSpec, ("a", [2], 6, 4), {"fqn": "b"}, "has two values for 'fqn'"),
        (_C.ParamSpec, ("a", [2], 6, 4, *range(6)), {}, "takes no argument after 'gather'"),
    ]
    for struct, given, named, text in cases:
        with pytest.raises(TypeError, match=rf"{struct.__name__}\(\) .*{text}"):
            struct(*given, **named)
    assert _C.ParamSpec("a", [2, 3], 6, 4, requires_grad=False).requires_grad is False
    assert _C.ParamSpec("a", [2, 3], dtype=6, itemsize=4).requires_grad


def test_the_version_in_this_extension() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    build = _C.build.encode()
    for text in (build, Path(_C.__file__).read_bytes(), b"nothing"):
        assert mismatch(text) is None
    other = build.replace(b"torch %s." % minor.encode(), b"torch 1.2.")
    assert other != build and "built for torch 1.2." in (mismatch(other) or "")
    assert mismatch(b", torch %s.99, CUDA: no kernels" % minor.encode()) is None
