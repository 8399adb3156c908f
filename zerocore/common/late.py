"""Functions that the core calls and packages over it have: each is imported at its first call."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class LateFunction(Generic[_Result]):
    """A function whose place :func:`register` names."""

    place = ""

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        result: _Result = resolve_name(self.place)(*args, **kwargs)
        return result


# Each returns the error to raise in place of the one that it is given, or None.
explain_forward = LateFunction[Exception | None]()
explain_backward = LateFunction[Exception | None]()
explain_step = LateFunction[Exception | None]()
# Raises ValueError if a model takes more memory than it may.
check_budget = LateFunction[None]()
# Makes a process group of the backend "emulated".
make_emulated_group = LateFunction[Any]()


def register(places: Mapping[LateFunction[Any], str]) -> None:
    """Says where functions are, as ``"module:name"``."""
    for function, place in places.items():
        function.place = place
