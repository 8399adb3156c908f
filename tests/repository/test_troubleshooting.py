"""The sentences that docs/troubleshooting.md quotes are those that the code says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def said_text() -> str:
    """The sources, with texts that stand in several literals in one."""
    files = [*(ROOT / "zerocore").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r'"\s*f?"', "", text)


def quotes(page: str) -> list[str]:
    """Sentences in backticks in the first column of the page's tables."""
    columns = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    return [text for each in columns for text in re.findall(r"`([^`]+)`", each) if " " in text]


def test_quotes_are_in_the_code() -> None:
    said = said_text()
    found = quotes((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(found) > 25
    parts = [part.strip() for text in found for part in text.split("...")]
    assert [part for part in parts if part not in said] == []
