"""The interface that programs write to: a change of it is a change of ``public_api.txt``."""

from __future__ import annotations

import inspect
from types import ModuleType

import zerocore
from tests.repository.public_api import FILE, lines_of, public_api

MAX_NAMES = 36


def test_the_interface_is_what_the_file_says() -> None:
    assert public_api() == FILE.read_text(), "run python -m tests.repository.public_api"


def test_changes_are_seen() -> None:
    """Of a parameter, a default, a method and a property."""

    class Plain:
        __module__ = "zerocore.planted"

        def __init__(self, size: int = 3) -> None:
            self.size = size

        @property
        def half(self) -> float:
            return self.size / 2

        def grow(self, by: int) -> None:
            self.size += by

    assert list(lines_of("Plain", Plain)) == [
        "class Plain(size: 'int' = 3) -> 'None'",
        "    grow(self, by: 'int') -> 'None'",
        "    half: float",
    ]
    assert list(lines_of("grow", Plain.grow)) == ["grow(self, by: 'int') -> 'None'"]


def test_the_surface_is_small() -> None:
    names = [
        name for name in zerocore.__all__ if not isinstance(getattr(zerocore, name), ModuleType)
    ]
    assert len(names) <= MAX_NAMES
    assert len(inspect.signature(zerocore.shard).parameters) == 12
    assert len(inspect.signature(zerocore.plan).parameters) == 10
