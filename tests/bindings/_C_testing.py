"""Parts of the C++ core that only tests call; compiled when the first of them is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiled import COMPILER, CSRC, ROOT, Extension, has_compiler

_PARTS = {
    "csrc/io/crc32.cpp",
    *("csrc/memory/bucket.cpp", "csrc/memory/bucket_pool.cpp", "csrc/memory/host_memory.cpp"),
    "csrc/device/stream.cpp",
    "csrc/memory/registered_memory.cpp",
    *("csrc/watch/control_link.cpp", "csrc/watch/issue_guard.cpp"),
    *("csrc/watch/ledger.cpp", "csrc/watch/roll_call.cpp"),
}
_LISTED = (CSRC / "sources.txt").read_text().split()
_OWN = sorted(path.relative_to(ROOT) for path in Path(__file__).parent.glob("*.cpp"))
EXTENSION = Extension(
    "_C_testing",
    (
        *(word for word in _LISTED if word.startswith("csrc/plan/") or word in _PARTS),
        *map(str, _OWN),
    ),
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # asked of any module
        raise AttributeError(name)
    if not has_compiler():
        pytest.skip(f"there is no {COMPILER} to compile tests/bindings with")
    return getattr(EXTENSION.load(), name)
