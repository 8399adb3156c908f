"""Writes ``public_api.txt``: every public name with its signature, a line each.

``python -m tests.repository.public_api`` renews the file, so that a change of the interface is seen
in a diff.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_name("public_api.txt")
PACKAGES = (
    "zerocore",
    "zerocore.emulation",
    "zerocore.fsdp",
    "zerocore.matrices",
    "zerocore.optim",
    "zerocore.planning",
    "zerocore.recovery",
    "zerocore.reporting",
    "zerocore.tensor",
    "zerocore.weights",
)


def signature_of(function: Any) -> str:
    """Parameters and result; of a default that is an object of torch its type alone."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(default=_Name(type(each.default)))
        if type(each.default).__module__.startswith("torch.distributed")
        else each
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters))


class _Name:
    """Shown as the call of a class."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"{self.kind.__name__}()"


def own_members(kind: type) -> dict[str, Any]:
    """Members that zerocore's own classes define, with those inherited; not torch's, which vary."""
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("zerocore")]
    return {name: value for base in own for name, value in sorted(vars(base).items())}


def is_fixed(kind: type) -> bool:
    """Whether no class of another library says how ``kind`` is made."""
    others = [base for base in kind.__mro__ if not base.__module__.startswith("zerocore")]
    return "__init__" in own_members(kind) and not any(map(is_dataclass, others))


def lines_of(name: str, value: Any) -> Iterator[str]:
    """The line of a function, or a class with its methods and properties."""
    if isinstance(value, ModuleType):
        yield f"{name}: package"
    elif not isinstance(value, type):
        yield f"{name}{signature_of(value)}"
    else:
        yield f"class {name}{signature_of(value) if is_fixed(value) else '(...)'}"
        members = own_members(value)
        for member in sorted(each for each in members if not each.startswith("_")):
            yield from _member_lines(member, members[member])


def _member_lines(name: str, value: Any) -> Iterator[str]:
    function = getattr(value, "__func__", value)
    if isinstance(value, property):
        yield f"    {name}: {inspect.get_annotations(value.fget).get('return')}"
    elif inspect.isfunction(function):
        yield f"    {name}{signature_of(function)}"


def public_api() -> str:
    """All packages in order."""
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines.append(f"# {package}")
        for name in sorted(module.__all__):
            lines += lines_of(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(public_api())
