"""Values of parameters that `make nightly` tests and `make test` leaves out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4)
SYSTEMS = (*STAGES, "fsdp")
ALL = {"stage": STAGES, "face": SYSTEMS, "system": SYSTEMS, "world_size": WORLD_SIZES}


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
    """The tests that `make test` leaves out.

    These are cells of grids, and all but the last set of parameters of a test marked `one_by_day`.
    """
    items = list(items)
    nights = {item.nodeid for item in items if item.get_closest_marker("nightly")}
    left = other_stages(items)
    nights |= {item.nodeid for item in left}
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid not in nights:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cells in tests.values():
        kept = cells
        if cells[0].get_closest_marker("one_by_day"):
            kept = cells[-1:]
        elif cells[0].get_closest_marker("distributed"):
            kept = cover(cells)
        left += [item for item in cells if item not in kept]
    return left


def other_stages(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Where a test runs at all stages: all but stage 3 and another one, which differs by test.

    The same goes for numbers of ranks, without stages: three ranks have uneven shards. The model of
    `fully_shard` stays, too. Where all stages meet all values of others, each of these values meets
    one of those that stay.
    """
    grids: dict[tuple[Path, str, str], dict[str, dict[int | str, pytest.Item]]] = defaultdict(dict)
    for item in items:
        values = params_of(item)
        axis = next((name for name in ALL if isinstance(values.get(name), int | str)), None)
        if axis is not None:
            value = values.pop(axis)
            grid = grids[item.path, item.nodeid.partition("[")[0], axis]
            grid.setdefault(repr(sorted(values.items())), {})[value] = item
    left: list[pytest.Item] = []
    turns: Counter[Path] = Counter()
    for (path, _, axis), grid in grids.items():
        for number, row in enumerate(grid.values()):
            always = [value for value in ALL[axis] if value in (3, "fsdp")]
            others = [value for value in ALL[axis] if value not in always]
            turn = number // (len(always) + 1)
            few = [*always, others[(turns[path] + turn) % len(others)]]
            kept = few if len(grid) == 1 else [few[number % len(few)]]
            if set(row) == set(ALL[axis]):
                left += [item for value, item in row.items() if value not in kept]
        turns[path] += 1
    return left


def cover(cells: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few of a grid's cells in which each value of each parameter occurs, later ones first.

    Parameters that are given together are one: each of their sets occurs.
    """
    values = {cell.nodeid: set(axes_of(cell).items()) for cell in cells}
    missing: set[tuple[str, str]] = set().union(*values.values())
    kept: list[pytest.Item] = []
    while missing or not kept:
        best = max(reversed(cells), key=lambda cell: len(values[cell.nodeid] & missing))
        missing -= values[best.nodeid]
        kept.append(best)
    return kept


def axes_of(item: pytest.Item) -> dict[str, str]:
    """The item's values: those that one `parametrize` gives together, and each one of a fixture."""
    params = params_of(item)
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = {}
    for names in together:
        group = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        axes[str(group)] = repr([params.pop(name, None) for name in group])
    return axes | {name: repr(value) for name, value in params.items()}


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The values of the item's parameters."""
    return dict(getattr(getattr(item, "callspec", None), "params", {}))
