"""The list of programs; every file of programs adds to it when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from tests.distributed.programs.systems import Run

Function = Callable[[Run], None]

THEMES = (
    "loops",
    "graphs",
    "losses",
    "reads",
    "places",
    "hooks",
    "norms",
    "optimizers",
    "custom",
    "averages",
    "parts",
    "layers",
    "modes",
    "outputs",
    "saving",
    "moves",
    "huggingface",
)


@dataclass(frozen=True)
class Program:
    """One program: the name of its function, and what it does in words.

    `needs` is what it imports. `unused` says that some parameters get no gradient in some steps:
    DistributedDataParallel must be told so.
    """

    name: str
    title: str
    function: Function
    needs: str | None
    unused: bool

    @property
    def can_run(self) -> bool:
        """Whether what it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


_programs: dict[str, Program] = {}


def program(
    title: str, needs: str | None = None, unused: bool = False
) -> Callable[[Function], Function]:
    """Adds the function under it to the suite."""

    def add(function: Function) -> Function:
        name = function.__name__
        if name in _programs:
            raise ValueError(f"two programs are called {name}")
        _programs[name] = Program(name, title, function, needs, unused)
        return function

    return add


def all_programs() -> dict[str, Program]:
    """Every program that can run here, by its name, in the order of the themes."""
    for theme in THEMES:
        importlib.import_module(f"tests.distributed.programs.{theme}")
    return {name: found for name, found in _programs.items() if found.can_run}
