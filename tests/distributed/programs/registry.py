"""The list of programs; every file of programs adds to it when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from tests.distributed.programs.run import Run

Function = Callable[[Run], None]

THEMES = (
    "loops",
    "graphs",
    "edges",
    "ways",
    "losses",
    "reads",
    "functions",
    "places",
    "hooks",
    "norms",
    "optimizers",
    "custom",
    "surgery",
    "averages",
    "parts",
    "layers",
    "modes",
    "outputs",
    "saving",
    "moves",
    "huggingface",
    "adapters",
    "posttraining",
    "kernels",
    "gradients",
    "states",
    "codebooks",
    "evaluation",
    "parallel",
    "weights",
    "inside",
    "leftovers",
    "speech",
    "diffusion",
    "detection",
    "contrast",
    "graphnets",
    "agents",
    "teaching",
    "search",
    "fields",
    "series",
    "generative",
    "compress",
    "curvature",
    "exports",
    "transforms",
    "language",
    "tasks",
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
    def theme(self) -> str:
        """The file it is in."""
        return self.function.__module__.rpartition(".")[2]

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


def all_programs(installed: bool = True) -> dict[str, Program]:
    """Every program by its name, in the order of the themes; of those that can run here."""
    return _programs_of(THEMES, installed)


def broken_programs() -> dict[str, Program]:
    """Programs that go wrong under zerocore in every way; the suite must notice."""
    return _programs_of(("broken",), True)


def _programs_of(themes: tuple[str, ...], installed: bool) -> dict[str, Program]:
    for theme in themes:
        importlib.import_module(f"tests.distributed.programs.{theme}")
    chosen = (p for theme in themes for p in _programs.values() if p.theme == theme)
    return {found.name: found for found in chosen if found.can_run or not installed}
