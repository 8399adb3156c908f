"""Which units a module enters, and the order that is expected before a forward was seen."""

from __future__ import annotations

from torch import nn

from zerocore._C import CallEvent
from zerocore.model.units import UnitPlanned


def call_order(model: nn.Module, planned: list[UnitPlanned]) -> list[CallEvent]:
    """Enters and exits of the units if modules are called in order of registration."""
    units_of = units_by_module(planned)
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

    visit(model)
    return order


def backward_reads(module: nn.Module) -> bool:
    """Whether a backward through the module reads its parameters, as far as its class says.

    The runtime looks at the graph of each call instead.
    """
    return not isinstance(module, nn.Embedding)


def units_by_module(planned: list[UnitPlanned]) -> dict[int, tuple[int, ...]]:
    """Units to enter by id of the module that is called."""
    found: dict[int, tuple[int, ...]] = {}
    for index, unit in enumerate(planned):
        for module in unit.modules:
            found[id(module)] = (*found.get(id(module), ()), index)
    return found
