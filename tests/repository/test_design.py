"""docs/design.md and its second page name functions and files that there are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("design.md", "design-around.md")
SPANS = {
    name: re.findall(r"`([^`\n]+)`", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    for name in PAGES
}
ENDINGS = ("", ".h", ".cpp", ".py", ".cu")


@cache
def sources() -> list[str]:
    files = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    return [path.read_text(encoding="utf-8") for path in files]


def is_there(owner: str, member: str) -> bool:
    """Whether a source defines the function, or a header with the type names the member."""
    defined = re.compile(rf"\b{owner}::{member}\(")
    declared = re.compile(rf"\b{member}\b")
    of_class = re.compile(rf"^(class|struct|enum class) {owner}\b[^;]*{{", re.MULTILINE)
    return any(
        defined.search(text) or (of_class.search(text) and declared.search(text))
        for text in sources()
    )


def test_members_are_there() -> None:
    found = [span for spans in SPANS.values() for span in spans if re.fullmatch(r"\w+::\w+", span)]
    assert len(found) > 25
    assert [name for name in found if not is_there(*name.split("::"))] == []
    assert not is_there("ModelCalls", "unshard_all")


def test_files_are_there() -> None:
    """Paths from the root, csrc/, zerocore/ or the folder of the pages."""
    places = [ROOT, ROOT / "csrc", ROOT / "zerocore"]
    for page, spans in SPANS.items():
        for span in spans:
            if re.fullmatch(r"[a-z_]+(/[a-z_0-9.]+)+/?", span):
                paths = [place / f"{span}{end}" for place in places for end in ENDINGS]
                assert any(path.exists() for path in paths), f"{page}: {span}"
