"""The Python package: imports point down its ladder, in no cycle, and to what is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zerocore
from tests.repository.file_map import named_files
from tests.repository.python_tree import (
    CORE,
    SATELLITES,
    cycle_in,
    import_effects,
    import_graph,
    ladder_errors,
    python_files,
)

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


def test_imports_point_down_the_ladder() -> None:
    assert ladder_errors(PACKAGE) == []


def test_satellites_see_what_the_table_says() -> None:
    graph = import_graph(PACKAGE)
    for satellite, others in SATELLITES.items():
        own = [targets for name, targets in graph.items() if name.split(".")[1:2] == [satellite]]
        found = {target.split(".")[1] for targets in own for target in targets if "." in target}
        assert sorted(found & {*SATELLITES} - {satellite}) == sorted(others), satellite


# Modules that these four load, and lines of them; the rest of zerocore is loaded when it is used.
CORE_PROGRAM = """
import sys, zerocore
from zerocore import Checkpoints, shard
from zerocore.fsdp import fully_shard
from zerocore.optim import AdamW
print(*(name for name in sys.modules if name.split(".")[0] == "zerocore"))
"""
MAX_CORE_LINES = 14_000


def loaded_modules(program: str) -> set[str]:
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(run.stdout.split())


def test_public_names_are_those_of_type_checkers() -> None:
    names = {name: getattr(zerocore, name) for name in zerocore.__all__}
    assert names.keys() <= {*dir(zerocore)}
    for name, module in zerocore._places().items():
        assert getattr(names[name], "__module__", module) == module or module == "zerocore"


def test_the_core_loads_itself_alone() -> None:
    texts, loaded = python_files(PACKAGE), loaded_modules(CORE_PROGRAM)
    parts = {name.split(".")[1] for name in loaded if "." in name}
    assert parts - {part for floor in CORE for part in floor} == set()
    assert sum(texts[name].count("\n") for name in loaded & texts.keys()) <= MAX_CORE_LINES


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("common/planted.py", "from zerocore.planning import planner"),
        ("common/planted.py", "import zerocore.planning.planner"),
        ("common/planted.py", "from ..planning import planner"),
        ("model/state.py", "def late():\n    from zerocore.reporting.report import report"),
        ("optim/planted.py", "from zerocore import shard"),
        ("tensor/planted.py", "import_module('zerocore.api')"),
        ("state_dict.py", "from zerocore.sharding.builder import build"),
        ("sharding/builder.py", "from zerocore.reporting.out_of_memory import explain_step"),
        ("recovery/planted.py", "from zerocore.planning import planner"),
        ("planted.py", "# A module beside the packages."),
        ("planted/module.py", "# A package without a floor."),
    ],
)
def test_what_breaks_the_ladder_is_found(copied: Path, path: str, text: str) -> None:
    plant(copied, path, text)
    assert len(ladder_errors(copied)) == 1


def test_a_file_in_the_wrong_place_is_found(copied: Path) -> None:
    moved = copied / "planning" / "advice.py"
    moved.rename(copied / "common" / "advice.py")
    assert any("zerocore.common.advice" in error for error in ladder_errors(copied))


def test_every_folder_is_a_package() -> None:
    """One without ``__init__.py`` would be missing from what is installed."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


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


def test_importing_acts_in_one_place() -> None:
    """Changes of torch or of the process are functions that ``zerocore.install`` calls."""
    effects = {name: import_effects(text) for name, text in python_files(PACKAGE).items()}
    effects["zerocore"] = [effect.partition("(")[0] for effect in effects["zerocore"]]
    assert {name: found for name, found in effects.items() if found} == {
        "zerocore": ["load_core"],
        "zerocore.cli.app": ["app.add_typer(checkpoint_commands, name='checkpoint')"],
        "zerocore.extension": ["import_extension(Path(__file__).parent)"],
        "zerocore.__main__": ["main()"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "nn.Module._apply = _apply",
        "if hasattr(os, 'fork'):\n    os.register_at_fork(after_in_child=f)",
        "class A:\n    register(1)",
    ],
)
def test_an_effect_of_an_import_is_found(text: str) -> None:
    assert len(import_effects(text)) == 1
    assert import_effects(f"def later():\n    {text.splitlines()[-1].strip()}") == []


def test_the_file_map_is_complete() -> None:
    """Every module is named in its package's row of docs/files.md."""
    text = (PACKAGE.parent / "docs" / "files.md").read_text()
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    folders = {file: "/".join(file.parts[:-1]) or "root" for file in files}
    found = {(folder, file.stem) for file, folder in folders.items() if file.stem != "__init__"}
    assert found - named_files(text, "zerocore/") == set()
