"""A hook of mkdocs: pages that lie outside of docs/ become part of the site, links keep working.

README.md is the first page. A link is written as a path in the repository, which GitHub and an
editor follow; the site has docs/ at its root, so each link to a file gets its path there.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
RESULTS = "benchmarks/results"
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, and what pages of docs/ link to: results, pictures, examples."""
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    linked = {link[1].removeprefix("../") for text in texts for link in LINK.finditer(text)}
    names = {name for name in linked if (ROOT / name).is_file()} - set(OUTSIDE)
    for name in [*OUTSIDE, *sorted(names)]:
        added = File.generated(config, name, abs_src_path=str(ROOT / name))
        if name not in OUTSIDE:
            added.inclusion = added.inclusion.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files become paths of the site."""
    origin = Path(page.file.abs_src_path).parent
    here = posixpath.dirname(page.file.src_uri) or "."

    def moved(link: re.Match[str]) -> str:
        if not (origin / link[1]).exists():
            return link[0]
        path = Path(os.path.relpath(origin / link[1], ROOT)).as_posix().removeprefix("docs/")
        return f"]({posixpath.relpath(path, here)}{link[2] or ''})"

    if page.file.src_uri.startswith(RESULTS):  # code in tables is no link: state[p]['exp_avg']
        markdown = markdown.replace("][", "]\\[")
    return LINK.sub(moved, markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Links of notebooks, which mkdocs does not follow: every page is a folder."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="([\w-]+)\.md(#[^"]*)?"', r'href="../\1/\2"', html)
