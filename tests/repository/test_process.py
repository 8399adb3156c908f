"""docs/process.md names all that zerocore changes in a process: functions, variables, groups."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from zerocore.hooks.patches import PATCHES
from zerocore.install import MORE_PATCHES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "process.md").read_text(encoding="utf-8")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
NO_VARIABLES = {"CUDA", "NCCL", "NVML", "SC_PAGESIZE", "SOABI", "ZEROCORE_CXX_FLAGS"}
NO_VARIABLES |= {"ZEROCORE_CUDA_BUILD"}  # a macro


def named(section: str) -> set[str]:
    """The words in backticks of the page's section."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([^`\s]+)`", text))


def variables(text: str) -> Iterator[str]:
    """Texts of a file that may be names of variables of the environment."""
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and len(value) > 3 and VARIABLE.fullmatch(value):
            yield value


def test_every_function_that_is_replaced_is_named() -> None:
    replaced = {f"{patch.owner}.{patch.name}" for patch in (*PATCHES, *MORE_PATCHES)}
    names = named("Functions of torch that are replaced")
    patterns = {name for name in names if name.startswith(("torch.", "transformers.", "peft."))}
    unnamed = {name for name in replaced if not any(fnmatchcase(name, each) for each in patterns)}
    assert unnamed == set()
    stale = {each for each in patterns if not any(fnmatchcase(name, each) for name in replaced)}
    assert stale <= {"torch.load", "torch.FloatTensor", "torch.compile"}


def test_every_variable_is_named() -> None:
    files = [*(ROOT / "zerocore").rglob("*.py"), ROOT / "setup.py"]
    texts = [text for path in files if "environ" in (text := path.read_text(encoding="utf-8"))]
    found = {name for text in texts for name in variables(text)} - NO_VARIABLES
    assert "ZEROCORE_STALL_SECONDS" in found
    assert found - named("Environment variables") == set()
    for path in (ROOT / "csrc").rglob("*.*"):
        assert "getenv" not in path.read_text(encoding="utf-8"), path


def test_every_process_group_is_named() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "zerocore").rglob("*.py")]
    made = {name for text in texts for name in re.findall(r'"(zerocore_[a-z]+)"', text)}
    assert "zerocore_control" in made
    assert made - named("Process groups") == set()
