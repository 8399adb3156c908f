"""Compiles the device once, in the tests' own process; its ranks load it."""

from __future__ import annotations

import pytest

from tests.async_device.device import EXTENSION
from tests.compiled import COMPILER, has_compiler


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    if not has_compiler():
        pytest.skip(f"there is no {COMPILER} to compile the device with")
    EXTENSION.compile()
