"""The code blocks of README and docs: Python runs, commands name scripts and options that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "bash"}


def blocks(page: Path, language: str) -> list[str]:
    """Blocks of a language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(page, command) for each Python script that a page says to run."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = "".join(blocks(page, "bash")).splitlines()
        lines += re.findall(r"`(python [^`\n]+)`", text)
        found += [(page.name, line) for line in lines if line.startswith("python benchmarks/")]
    return sorted(set(found))


def test_there_are_blocks() -> None:
    assert blocks(ROOT / "README.md", "python")
    assert commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= LANGUAGES
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@cache
def help_of(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_exist(page: str, command: str) -> None:
    _, script, *args = command.split()
    assert (ROOT / script).exists()
    for option in args:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", help_of(script)), option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
