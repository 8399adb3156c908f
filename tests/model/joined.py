"""Small blocks as one unit, as in programs: tests have a unit for each block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zerocore.model import units


@contextmanager
def joined(nbytes: int = 1 << 20) -> Iterator[None]:
    """Blocks that `shard` finds in here are joined up to that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "JOINED_NBYTES", nbytes)
        yield
