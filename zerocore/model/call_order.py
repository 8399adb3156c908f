"""Which units a module enters, and the order that is expected before a forward was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from zerocore._C import CallEvent

UnitsOf = Mapping[int, tuple[int, ...]]
"""Units to enter by id of the module that is called."""


def call_order(models: Iterable[nn.Module], units_of: UnitsOf) -> list[CallEvent]:
    """Enters and exits of the units if modules are called in order of registration."""
    order: list[CallEvent] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        units = units_of.get(id(module), ())
        order.extend(CallEvent(True, unit) for unit in units)
        for child in module.children():
            visit(child)
        reads = backward_reads(module)
        order.extend(CallEvent(False, unit, reads=reads) for unit in units[::-1])

    for model in models:
        visit(model)
    return order


def backward_reads(module: nn.Module) -> bool:
    """Whether a backward through the module reads its parameters, as far as its class says.

    The runtime looks at the graph of each call instead.
    """
    return not isinstance(module, nn.Embedding)


def units_by_module(units: Iterable[Sequence[nn.Module]]) -> UnitsOf:
    """The units that each module enters, from the modules whose calls enter each unit."""
    found: dict[int, tuple[int, ...]] = {}
    for index, modules in enumerate(units):
        for module in modules:
            found[id(module)] = (*found.get(id(module), ()), index)
    return found
