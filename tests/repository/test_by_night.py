"""Of a grid, `make test` runs a part that covers it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.by_night import STAGES, WORLD_SIZES, cover, left_out


def item(name: str, *marks: str, **params: Any) -> Any:
    return SimpleNamespace(
        path=Path("test_it.py"),
        nodeid=f"test_it.py::{name}[{params}]",
        name=name,
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda mark: mark if mark in marks else None,
        iter_markers=lambda name: [],
    )


def by_day(items: list[Any]) -> list[dict[str, Any]]:
    left = {each.nodeid for each in left_out(items)}
    return [each.callspec.params for each in items if each.nodeid not in left]


def test_the_last_of_those_by_day_stays() -> None:
    ways = [item("one", "one_by_day", way=way) for way in "ab"]
    ways.append(item("one", "one_by_day", "nightly", way="c"))
    assert [each["way"] for each in by_day(ways)] == ["b", "c"]
    grid = [item("grid", "one_by_day", stage=stage, way=way) for way in "ab" for stage in STAGES]
    assert by_day(grid) == [{"stage": 0, "way": "b"}]


def test_stage_3_and_another_one_stay() -> None:
    alone = [[item(name, stage=stage) for stage in STAGES] for name in ("first", "second")]
    found = by_day(alone[0] + alone[1])
    assert [each["stage"] for each in found] == [0, 3, 1, 3]
    ranks = by_day([item("ranks", world_size=number) for number in WORLD_SIZES])
    assert [each["world_size"] for each in ranks] == [1, 3]


def test_each_value_meets_one_of_the_two() -> None:
    grid = [item("grid", stage=stage, way=way) for way in "abcdef" for stage in STAGES]
    found = by_day(grid)
    assert [each["way"] for each in found] == list("abcdef")
    assert [each["stage"] for each in found] == [3, 0, 3, 1, 3, 2]


def test_chosen_stages_stay() -> None:
    assert len(by_day([item("few", stage=stage) for stage in (0, 2, 3)])) == 3
    assert len(by_day([item("plain", way=way) for way in "ab"])) == 2


def test_each_value_stays_on_real_ranks() -> None:
    grid = [item("it", "distributed", way=way, size=n) for way in "abc" for n in (2, 4, 8)]
    found = by_day(grid)
    assert found == [{"way": "a", "size": 2}, {"way": "b", "size": 4}, {"way": "c", "size": 8}]
    alone = [item("it", "distributed", way=way) for way in "abc"]
    assert len(by_day([*alone, item("other", "distributed")])) == 4


def test_sets_of_values_stay_together() -> None:
    @pytest.mark.parametrize("way", ["x", "y"])
    @pytest.mark.parametrize(("world", "stage"), [(2, 3), (3, 3), (2, 0)])
    def test() -> None: ...

    cells = [item("it", world=w, stage=s, way=x) for w, s in [(2, 3), (3, 3), (2, 0)] for x in "xy"]
    for cell in cells:
        cell.iter_markers = lambda name: test.pytestmark
    found = [cell.callspec.params for cell in cover(cells)]
    assert {(each["world"], each["stage"]) for each in found} == {(2, 3), (3, 3), (2, 0)}
    assert {each["way"] for each in found} == set("xy") and len(found) == 3


def test_a_model_of_fully_shard_stays() -> None:
    alone = [item("it", face=face) for face in (*STAGES, "fsdp")]
    assert [each["face"] for each in by_day(alone)] == [0, 3, "fsdp"]
    grid = [item("it", way=way, face=face) for way in "abcd" for face in (*STAGES, "fsdp")]
    assert [each["face"] for each in by_day(grid)] == [3, "fsdp", 0, 3]
