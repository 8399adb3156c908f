"""The Python package: no import cycles, and no imports of what is not installed with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.repository.python_tree import cycle_in, import_graph

PACKAGE = Path(__file__).resolve().parents[2] / "zerocore"
NOT_INSTALLED = {"tests", "benchmarks", "examples", "scripts"}


def outside_errors(package: Path) -> list[str]:
    """Imports of folders that lie beside the package and are not installed with it."""
    return [
        f"{name} imports {target}"
        for name, targets in import_graph(package).items()
        for target in sorted(targets)
        if target.split(".")[0] in NOT_INSTALLED
    ]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package's Python files, to plant mistakes in."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "presets")
    return Path(shutil.copytree(PACKAGE, tmp_path / "zerocore", ignore=ignored))


def plant(package: Path, path: str, text: str) -> None:
    """Adds ``text`` to the end of a file of the package, which may be new."""
    file = package / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(f"\n{text}\n")


def test_no_cycles(copied: Path) -> None:
    assert cycle_in(import_graph(PACKAGE)) == []
    plant(copied, "planted/first.py", "from zerocore.planted import second")
    assert cycle_in(import_graph(copied)) == []
    plant(copied, "planted/second.py", "def late():\n    from . import first")
    found = cycle_in(import_graph(copied))
    assert set(found) == {"zerocore.planted.first", "zerocore.planted.second"}


@pytest.mark.parametrize(
    "text",
    [
        "import benchmarks.overlap",
        "def late():\n    from tests import zoo",
        "importlib.import_module('examples.gpt')",
    ],
)
def test_package_imports_only_the_package(copied: Path, text: str) -> None:
    assert outside_errors(PACKAGE) == []
    plant(copied, "planted/module.py", text)
    assert len(outside_errors(copied)) == 1
