"""Keywords of a function that are also fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest

import zerocore
from zerocore.common.options import UNSET, options_of


@dataclass(frozen=True)
class Speed:
    limit: int = 3
    unit: str | None = "km/h"


def drive(speed: Speed | None = None, limit: int = UNSET, unit: str | None = UNSET) -> Speed:
    return options_of(speed, Speed, limit=limit, unit=unit)


def test_both_spellings_are_equal() -> None:
    assert drive() == Speed()
    assert drive(limit=5) == drive(Speed(limit=5)) == Speed(5, "km/h")
    assert drive(unit=None) == drive(Speed(unit=None)) == Speed(3, None)


@pytest.mark.parametrize("options", [{"limit": 5}, {"limit": 3}, {"unit": None}])
def test_both_at_a_time_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}= is given twice: speed= holds it, too"):
        drive(Speed(), **options)


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"speed must be a zerocore\.Speed, got 5"):
        drive(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="limi"):
        options_of(None, Speed, limi=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (zerocore.shard, "Communication"),
        (zerocore.plan, "Communication"),
        (zerocore.plan, "Workload"),
        (zerocore.plan, "Machine"),
    ],
)
def test_keywords_have_the_types_of_the_fields(function: Callable[..., Any], name: str) -> None:
    """All fields are keywords; a plan lacks those that change none of its figures."""
    keywords = inspect.signature(function).parameters
    types = {field.name: field.type for field in fields(getattr(zerocore, name))}
    shared = types.keys() & keywords.keys()
    assert {keyword: keywords[keyword].annotation for keyword in shared} == {
        keyword: types[keyword] for keyword in shared
    }
    assert all(keywords[keyword].default is UNSET for keyword in shared)
    lacking = {
        *("overlap_reductions", "gradient_divide_factor", "sync_buffers", "static_graph"),
        "registered",
    }
    assert types.keys() - shared == (lacking & types.keys() if function is zerocore.plan else set())
