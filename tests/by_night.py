"""Values of parameters that `make nightly` tests and `make test` leaves out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4)
ALL = {"stage": STAGES, "world_size": WORLD_SIZES}


def by_night(*values: Any) -> list[Any]:
    """These values; a tuple is the values of several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for value in values
    ]


def by_day(values: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """The values, of which only `few` are tested by day."""
    return [*by_night(*(each for each in values if each not in few)), *few]


stage_3_by_day = pytest.mark.parametrize("stage", [*by_night(0, 1, 2), 3])


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Where a test runs at all stages: all but stage 3 and another one, which differs by test.

    The same goes for numbers of ranks, without stages: three ranks have uneven shards. Where all
    stages meet all values of others, each of these values meets one of the two. Of a test that is
    marked `one_by_day` all sets of parameters but the last are left out.
    """
    items = list(items)
    grids: dict[tuple[Path, str, str], dict[str, dict[int, pytest.Item]]] = defaultdict(dict)
    for item in items:
        values = dict(getattr(getattr(item, "callspec", None), "params", {}))
        axis = next((name for name in ALL if isinstance(values.get(name), int)), None)
        if axis is not None:
            value = values.pop(axis)
            grid = grids[item.path, item.nodeid.partition("[")[0], axis]
            grid.setdefault(repr(sorted(values.items())), {})[value] = item
    left: list[pytest.Item] = []
    turns: Counter[Path] = Counter()
    for (path, _, axis), grid in grids.items():
        for number, row in enumerate(grid.values()):
            others = [value for value in ALL[axis] if value != 3]
            two = (3, others[(turns[path] + number // 2) % 3])
            kept = two if len(grid) == 1 else (two[number % 2],)
            if tuple(sorted(row)) == ALL[axis]:
                left += [item for value, item in row.items() if value not in kept]
        turns[path] += 1
    nights = {item.nodeid for item in left}
    nights |= {item.nodeid for item in items if item.get_closest_marker("nightly")}
    ones = [item for item in items if item.get_closest_marker("one_by_day")]
    ones = [item for item in ones if item.nodeid not in nights]
    last = {item.nodeid.partition("[")[0]: item.nodeid for item in ones}
    return left + [item for item in ones if item.nodeid not in last.values()]
