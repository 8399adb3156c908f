"""Reads the maps of files in docs/files.md."""

from __future__ import annotations

import re


def named_files(page: str, tree: str) -> set[tuple[str, str]]:
    """Each (folder, file without its ending) that the page's table of ``tree`` names.

    Folders are paths from the tree, without a slash at the end; the tree itself is "root".
    """
    section = page.split(f"## Files of `{tree}`\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (root|`[\w/]+/`) \| (.+) \|$", section, re.MULTILINE)
    return {
        (folder.strip("`/"), name)
        for folder, row in rows
        for name in re.findall(r"`(\w+)(?:/?)`", row)
    }
