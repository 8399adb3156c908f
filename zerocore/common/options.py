"""Options that a function takes one by one, or together as a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""Default of a keyword that is a field of a dataclass, too, which has the default."""


def options_of(given: T | None, make: Callable[P, T], *none: P.args, **keywords: P.kwargs) -> T:
    """``given``, or the dataclass ``make`` of those keywords that are not :data:`UNSET`.

    Raises:
        ValueError: the caller gave both, or a value that the dataclass refuses.
        TypeError: ``given`` is no such dataclass.
    """
    for name in [name for name, value in keywords.items() if value is UNSET]:
        del keywords[name]
    if given is None:
        return make(*none, **keywords)
    kind = make.__name__
    if type(given) is not make:
        raise TypeError(f"{kind.lower()} must be a zerocore.{kind}, got {given!r}")
    if keywords:
        name = next(iter(keywords))
        raise ValueError(
            f"{name}= is given twice: {kind.lower()}= holds it, too; leave one of them out, or "
            f"write {kind.lower()}=zerocore.{kind}({name}=...)"
        )
    return given
