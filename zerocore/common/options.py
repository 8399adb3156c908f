"""Options that a function takes one by one, or together as a dataclass; checks of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar


def require_int(name: str, value: object) -> int:
    """The value; raises TypeError if it is no int. A bool counts as none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return value


def check_int(name: str, value: object, minimum: int) -> None:
    """Raises TypeError if ``value`` is no int, ValueError if it is below ``minimum``."""
    if require_int(name, value) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


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
