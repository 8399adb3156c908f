"""Benchmarks and examples use names that zerocore has, also where a type checker sees Any."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def uses_in(text: str) -> Iterator[str]:
    """Yields `zerocore.a.b` for `zerocore.a.b` and `import_zerocore().a.b`."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Call) and not node.args:
            node = node.func
        if names and isinstance(node, ast.Name) and node.id in ("zerocore", "import_zerocore"):
            yield ".".join(["zerocore", *names])


def exists(name: str) -> bool:
    found, path = importlib.import_module("zerocore"), "zerocore"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


def test_uses_exist() -> None:
    text = "import_zerocore().record_events(m); zerocore.shard(m); zerocore.optim.AdamW"
    assert sorted(name for name in set(uses_in(text)) if not exists(name)) == [
        "zerocore.record_events"
    ]
    for folder in ("benchmarks", "examples", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            missing = sorted(n for n in set(uses_in(path.read_text())) if not exists(n))
            assert missing == [], path
