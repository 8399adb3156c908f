"""Names in README, CONTRIBUTING and docs exist: of Python, of files, of the environment."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest

from tests.repository.test_house import source_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Files are named by a path from the root or from one of these.
FOLDERS = [".", "csrc", "csrc/plan", "docs", "benchmarks", "examples", "examples/cluster"]
FOLDERS += ["tests", "zerocore"]


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    parts = name.split(".")
    found = None
    for part in range(len(parts)):
        if found is not None and hasattr(found, parts[part]):
            found = getattr(found, parts[part])
            continue
        try:
            with catch_warnings():  # those of the library that an adapter is for
                simplefilter("ignore")
                found = import_module(".".join(parts[: part + 1]))
        except ImportError as error:  # a module of an extra exists without its library, too
            return not (error.name or "zerocore").startswith("zerocore")
    return True


def is_file(path: str) -> bool:
    """Whether a file has that path, which may lack the ending."""
    patterns = [f"{folder}/{path}{end}" for folder in FOLDERS for end in ("", ".*")]
    return any(any(ROOT.glob(pattern)) for pattern in patterns)


def test_mistakes_are_found() -> None:
    assert exists("zerocore.optim.AdamW") and exists("zerocore.reporting.report.PEAK_FLOPS")
    assert not exists("zerocore.emulation.PRESETS") and not exists("zerocore.nothing.here")
    assert (
        is_file("plan/schedule")
        and is_file("comm/control_channel.h")
        and not is_file("plan/nothing")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\bzerocore(?:\.[A-Za-z_]\w*)+", text))
    assert [name for name in sorted(names) if not exists(name)] == []
    layers = r"(?:common|plan|kernels|runtime|engine|bindings)"
    paths = {
        *re.findall(r"`([\w./-]+\.(?:py|h|cpp|cu|sh|toml|txt))`", text),
        *re.findall(rf"`({layers}/[a-z_]+)`", text),
    }
    assert [path for path in sorted(paths) if not is_file(path)] == []


def test_variables_of_the_environment_exist() -> None:
    """Those that a page names are read somewhere."""
    sources = [
        *source_files().values(),
        *((ROOT / n).read_text() for n in ("setup.py", "Makefile")),
    ]
    for page in PAGES:
        for name in set(re.findall(r"\bZEROCORE_\w+", page.read_text(encoding="utf-8"))):
            assert any(name in text for text in sources), f"{page.name}: {name}"
