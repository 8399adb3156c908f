"""A sentence has a noun as its subject, not a clause ("What is read ...") or "Somebody"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "zerocore", "tests", "docs", "examples", "benchmarks", "scripts")
ENDINGS = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".md", ".sh"}
EXCLUDED = ("benchmarks/results", "tests/repository/test_english.py")  # texts of programs
SUBJECTS = "What|Whatever|Whoever|Who|Nobody|Somebody|Whichever"
MARK = r"(?://|#+|-|\*|>|\d\.)?"  # of a comment, a heading or an item
BEGINNING = re.compile(rf"(?:^\s*{MARK}\s*|[.!:] |[\"`]{{2,3}}|\*\* |// |# )({SUBJECTS})\b(.*)")


def clauses(text: str) -> list[int]:
    """The lines on which such a sentence begins; questions are none."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        begins = BEGINNING.search(line)
        if begins and "?" not in begins[2]:
            found.append(number)
    return found


def pages() -> dict[str, str]:
    """The texts of the repository, by path."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    names = [*files, *ROOT.glob("*.md"), ROOT / "setup.py"]
    paths = {path.relative_to(ROOT).as_posix(): path for path in names if path.suffix in ENDINGS}
    return {name: path.read_text() for name, path in paths.items() if not name.startswith(EXCLUDED)}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("// What is read.\nint a;", [1]),
        ('"""Whoever reads waits."""', [1]),
        ("a = 1  # A rank. What it sends is lost.", [1]),
        ("- Somebody reads.\n## What differs", [1, 2]),
        ("# What is it?\n# The part that is read. It says what it is.", []),
    ],
)
def test_the_rule(text: str, lines: list[int]) -> None:
    assert clauses(text) == lines


def test_sentences_have_a_noun_as_their_subject() -> None:
    found = [f"{name}:{line}" for name, text in pages().items() for line in clauses(text)]
    assert found == []
