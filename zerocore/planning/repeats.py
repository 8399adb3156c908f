"""Measures a model of equal blocks on a few of them, and repeats their figures for the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.model.units import UnitPlanned
from zerocore.planning.activations import Activations, Loss, record

_FEWEST = 8  # blocks; of fewer all are run
_REPEATED = 2  # the block of a short run whose figures are repeated
_SHORT = 4
_PLAIN = (bool, float, str, set, torch.dtype, torch.device)


def measure(
    model: nn.Module,
    planned: list[UnitPlanned],
    inputs: Any,
    loss: Loss,
    *,
    checkpointing: bool = False,
    dtype: torch.dtype | None = None,
) -> Activations:
    """Runs ``loss(model, inputs)`` and its backward on fake tensors; the model is left alone.

    Where blocks of the model are equal, it runs with 4 and with 5 of them. The figures of the
    short run, repeated once, must be those of the longer one. If they are, they are repeated for
    all blocks; else all blocks run.

    The arguments are those of :func:`zerocore.planning.activations.record`.

    Raises:
        Exception: what the model raises, also where its forward depends on values of tensors.
    """

    def run(units: list[UnitPlanned], dropped: Sequence[nn.Module] = ()) -> Activations:
        return record(
            model, units, inputs, loss, checkpointing=checkpointing, dtype=dtype, dropped=dropped
        )

    modules, blocks = _equal_blocks(model, planned)
    if not modules:
        return run(planned)

    def shortened(count: int) -> Activations:
        """Of the first blocks and the last. Units keep their numbers: of other blocks are none."""
        missing = {unit for units in blocks[count - 1 : -1] for unit in units}
        kept = [
            replace(unit, modules=[], params=[]) if number in missing else unit
            for number, unit in enumerate(planned)
        ]
        return run(kept, modules[count - 1 : -1])

    with suppress(Exception):  # of a model that needs all blocks; or of any, which is raised below
        short, longer = shortened(_SHORT), shortened(_SHORT + 1)
        grown = longer.saved_nbytes - short.saved_nbytes
        if _Repeat(short, blocks, 1).recording(grown) == longer:
            return _Repeat(short, blocks, len(blocks) - _SHORT).recording(grown)
    return run(planned)


class _Unlike(Exception):
    """Blocks do not all do the same, so that one cannot stand for the others."""


class _Repeat:
    """A short run whose third block comes ``copies`` times more; ``blocks``: units in each block.

    Raises:
        _Unlike, ValueError: the figures of more blocks do not follow from those of the short run.
    """

    def __init__(self, short: Activations, blocks: list[list[int]], copies: int) -> None:
        self.short, self.blocks, self.copies = short, blocks, copies
        self.block_of = {unit: block for block, units in enumerate(blocks) for unit in units}
        called = [self.block_of.get(call.unit) for call in short.order]
        size = called.count(_REPEATED)
        self.begin = called.index(_REPEATED)  # the events of the third block
        self.end = self.begin + size
        before, after = called[: self.begin], called[self.end :]
        in_order = before[-size:] == [_REPEATED - 1] * size and _REPEATED not in after
        if not in_order or len(blocks) - 1 in before or {0, _REPEATED - 1} & {*after}:
            raise _Unlike

    def unit(self, unit: int, copy: int) -> int:
        """The number of a unit where its block is the copy's."""
        if self.block_of.get(unit) != _REPEATED:
            return unit
        return self.blocks[_REPEATED + copy][self.blocks[_REPEATED].index(unit)]

    def spread(self, values: Sequence[Any]) -> list[tuple[Any, int]]:
        """Values by event of the short run, with the copy that each belongs to."""
        begin, end, copies = self.begin, self.end, self.copies
        inner = [(value, copy) for copy in range(copies + 1) for value in values[begin:end]]
        return [*((v, 0) for v in values[:begin]), *inner, *((v, copies) for v in values[end:])]

    def recording(self, grown: int) -> Activations:
        """The figures of the wanted run, in which each block more saves ``grown`` bytes."""
        short = self.short
        unused = [*short.unused]
        for units in self.blocks[_REPEATED : _REPEATED + self.copies + 1]:
            for unit, first in zip(units, self.blocks[_REPEATED], strict=True):
                unused[unit] = short.unused[first]
        return Activations(
            order=tuple(
                call._replace(unit=self.unit(call.unit, copy))
                for call, copy in self.spread(short.order)
            ),
            backward=tuple(self.backward()),
            saved_nbytes=short.saved_nbytes + self.copies * grown,
            live_nbytes=tuple(self.live()),
            flops=tuple(self.by_moment(short.flops)),
            unused=tuple(unused),
            work=tuple(self.by_moment(short.work)),
        )

    def halves(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Values of the forward and of the backward, both by event."""
        num_events = len(self.short.order)
        return values[:num_events], values[2 * num_events - 1 : num_events - 1 : -1]

    def by_moment(self, values: Sequence[Any]) -> list[Any]:
        """Values that each block has alike."""
        forward, backward = ([v for v, _ in self.spread(half)] for half in self.halves(values))
        return [*forward, *reversed(backward), values[-1]]

    def live(self) -> list[int]:
        """Live bytes.

        A block adds what it saves to all that runs between its forward and its backward, and what
        it keeps, such as gradients of a unit that is not complete, to all that runs later.
        """
        values = self.short.live_nbytes
        forward, backward = self.halves(values)
        saves, changes = self.step(forward), self.step(backward)
        keeps = self.copies * (saves - changes)

        def raised(half: Sequence[int], step: int, all_of_them: int) -> list[int]:
            return [  # a moment at which nothing ran has 0
                value and value + all_of_them + copy * step for value, copy in self.spread(half)
            ]

        end = values[-1] and values[-1] + keeps
        return [*raised(forward, saves, 0), *reversed(raised(backward, changes, keeps)), end]

    def step(self, half: Sequence[int]) -> int:
        """How much more the third block has than the one before it, at each event."""
        size = self.end - self.begin
        pairs = [(half[i - size], half[i]) for i in range(self.begin, self.end)]
        steps = {after - before for before, after in pairs if before or after}
        if len(steps) != 1:
            raise _Unlike
        return steps.pop()

    def backward(self) -> list[tuple[bool, int]]:
        """The backward's events; those between two blocks' first ones are repeated."""
        events = self.short.backward
        units = [index if ready else self.short.order[index].unit for ready, index in events]
        blocks = [self.block_of.get(unit) for unit in units]
        begin, end = blocks.index(_REPEATED), blocks.index(_REPEATED - 1)
        inner = [
            self.backward_event(event, copy)
            for copy in range(self.copies, -1, -1)
            for event in events[begin:end]
        ]
        before = [self.backward_event(event, self.copies) for event in events[:begin]]
        return [*before, *inner, *(self.backward_event(event, 0) for event in events[end:])]

    def backward_event(self, event: tuple[bool, int], copy: int) -> tuple[bool, int]:
        """An event of a block's copy, or of a block around them."""
        ready, index = event
        if ready:
            return ready, self.unit(index, copy)
        size = self.end - self.begin
        if index >= self.begin:  # an exit; those behind the block have moved by all copies
            index += size * (copy if index < self.end else self.copies)
        return ready, index


def _equal_blocks(
    model: nn.Module, planned: list[UnitPlanned]
) -> tuple[list[nn.Module], list[list[int]]]:
    """The longest stretch of equal blocks in a list, and the units in each; none if of no use."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    modules = max((_longest_stretch([*each]) for each in lists), key=len, default=[])
    if len(modules) < _FEWEST or _differs_by_layer(model, len(modules)):
        return [], []
    units = _units_in(modules, planned)
    return (modules, units) if units else ([], [])


def _longest_stretch(modules: list[nn.Module]) -> list[nn.Module]:
    """The most modules that follow each other and are equal."""
    best: list[nn.Module] = []
    current: list[nn.Module] = []
    for module in modules:
        current = [*current, module] if current and _alike(current[-1], module) else [module]
        best = max(best, current, key=len)
    return best


def _alike(one: Any, other: Any) -> bool:
    """Whether two values do the same in a forward, but for an index that counts blocks."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        facts = ("shape", "dtype", "device", "requires_grad")
        return all(getattr(one, name) == getattr(other, name) for name in facts)
    if isinstance(one, dict):
        same_keys = [*one] == [*other]
        return same_keys and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, nn.Module):
        return _alike(vars(one), vars(other))
    if type(one) is int:
        return other - one in (0, 1)
    return isinstance(one, _PLAIN) and bool(one == other)


def _differs_by_layer(model: nn.Module, num_blocks: int) -> bool:
    """Whether the configuration has a list of different values for the layers."""
    values = vars(getattr(model, "config", None) or object).values()
    lists = [value for value in values if isinstance(value, list | tuple)]
    return any(len(each) >= num_blocks and len({*map(str, each)}) > 1 for each in lists)


def _units_in(modules: list[nn.Module], planned: list[UnitPlanned]) -> list[list[int]]:
    """The units in each block; empty where one has none, or a unit is in several of them."""
    inside = [{id(inner) for inner in module.modules()} for module in modules]
    params = [{id(param) for param in module.parameters()} for module in modules]
    found: list[list[int]] = [[] for _ in modules]
    for number, unit in enumerate(planned):
        parts = {id(module) for module in unit.modules}
        own = {id(choice.param) for choice in unit.params}
        for block, (known, held) in enumerate(zip(inside, params, strict=True)):
            if not parts & known and not own & held:
                continue
            if not (parts <= known and own <= held):
                return []
            found[block].append(number)
    sizes = {len(units) for units in found}
    return found if len(sizes) == 1 and sizes != {0} else []
