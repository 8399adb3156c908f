"""Measures a model of equal blocks on a few of them, and repeats their figures for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    blocks = _Blocks.of(model, planned)
    if blocks is None:
        return run(planned)
    try:
        short, longer = (run(*blocks.shortened(planned, count)) for count in (_SHORT, _SHORT + 1))
        grown = longer.saved_nbytes - short.saved_nbytes
        found = None
        if blocks.repeat(short, _SHORT + 1, grown) == longer:
            found = blocks.repeat(short, len(blocks.modules), grown)
    except Exception:  # of a model that needs all blocks; or of any, which is raised below
        found = None
    return run(planned) if found is None else found


@dataclass
class _Blocks:
    """Equal blocks that follow each other in a list, and the units in each of them."""

    modules: list[nn.Module]
    units: list[list[int]]
    num_units: int  # of the model

    @classmethod
    def of(cls, model: nn.Module, planned: list[UnitPlanned]) -> _Blocks | None:
        """The longest stretch of equal blocks, None where there is none of use."""
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
        modules = max((_longest_stretch([*each]) for each in lists), key=len, default=[])
        if len(modules) < _FEWEST or _differs_by_layer(model, len(modules)):
            return None
        units = _units_in(modules, planned)
        return None if units is None else cls(modules, units, len(planned))

    def kept(self, count: int) -> list[int]:
        """The blocks that a run of so many has: the first ones, and the last."""
        return [*range(count - 1), len(self.modules) - 1]

    def numbers(self, count: int) -> tuple[list[int], list[list[int]]]:
        """The units of a run with so many blocks: all of them, and those in each block.

        The former are numbers in the whole model, the latter in the run.
        """
        kept = self.kept(count)
        missing = {u for i, units in enumerate(self.units) if i not in kept for u in units}
        present = [unit for unit in range(self.num_units) if unit not in missing]
        number = {unit: index for index, unit in enumerate(present)}
        return present, [[number[unit] for unit in self.units[i]] for i in kept]

    def shortened(
        self, planned: list[UnitPlanned], count: int
    ) -> tuple[list[UnitPlanned], list[nn.Module]]:
        """The units of a run with so many blocks, and the modules that it has not."""
        present, _ = self.numbers(count)
        kept = self.kept(count)
        dropped = [module for i, module in enumerate(self.modules) if i not in kept]
        return [planned[unit] for unit in present], dropped

    def repeat(self, short: Activations, wanted: int, grown: int) -> Activations | None:
        """The figures of so many blocks, ``grown`` bytes saved by each; None where they cannot
        be told from those of the short run."""
        repeat = _Repeat.of(short, self.numbers(_SHORT), self.numbers(wanted), wanted - _SHORT)
        return None if repeat is None else repeat.recording(grown)


@dataclass
class _Repeat:
    """A short run whose third block comes ``copies`` times more."""

    short: Activations
    copies: int
    units: list[int]  # of the short run: their numbers in the wanted one, where not in a block
    place: dict[int, tuple[int, int]]  # of units of the short run: block, position in the block
    wanted: list[list[int]]  # units in each block of the wanted run
    num_units: int
    begin: int = 0  # the events of the third block
    end: int = 0

    @classmethod
    def of(
        cls,
        short: Activations,
        own: tuple[list[int], list[list[int]]],
        wanted: tuple[list[int], list[list[int]]],
        copies: int,
    ) -> _Repeat | None:
        number = {unit: index for index, unit in enumerate(wanted[0])}
        place = {u: (b, i) for b, units in enumerate(own[1]) for i, u in enumerate(units)}
        units = [number[unit] for unit in own[0]]
        made = cls(short, copies, units, place, wanted[1], len(wanted[0]))
        blocks = [made.block_of(unit) for _, unit, *_ in short.order]
        if _REPEATED not in blocks:
            return None
        made.begin, size = blocks.index(_REPEATED), blocks.count(_REPEATED)
        made.end = made.begin + size
        before = [_REPEATED - 1] * size + [_REPEATED] * size
        return made if blocks[made.begin - size : made.end] == before else None

    def block_of(self, unit: int) -> int | None:
        """The block that a unit of the short run is in."""
        return self.place[unit][0] if unit in self.place else None

    def unit(self, unit: int, copy: int) -> int:
        """The number of a unit in the wanted run, where its block is the copy's."""
        if unit not in self.place:
            return self.units[unit]
        block, position = self.place[unit]
        return self.wanted[block + copy][position]

    def spread(self, values: Sequence[Any]) -> list[tuple[Any, int]]:
        """Values by event of the short run, with the copy that each belongs to."""
        begin, end, copies = self.begin, self.end, self.copies
        inner = [(value, copy) for copy in range(copies + 1) for value in values[begin:end]]
        return [*((v, 0) for v in values[:begin]), *inner, *((v, copies) for v in values[end:])]

    def recording(self, grown: int) -> Activations | None:
        """The figures of the wanted run."""
        short, backward = self.short, self.backward()
        live = self.live()
        if backward is None or live is None:
            return None
        calls = self.spread(short.order)
        order = [call._replace(unit=self.unit(call.unit, copy)) for call, copy in calls]
        unused: list[tuple[int, ...]] = [()] * self.num_units
        for unit, names in enumerate(short.unused):
            copies = self.copies if self.block_of(unit) == _REPEATED else 0
            for copy in range(copies + 1):
                last = self.copies if (self.block_of(unit) or 0) > _REPEATED else copy
                unused[self.unit(unit, last)] = names
        return Activations(
            order=tuple(order),
            backward=tuple(backward),
            saved_nbytes=short.saved_nbytes + self.copies * grown,
            live_nbytes=tuple(live),
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

    def live(self) -> list[int] | None:
        """Live bytes; None where blocks do not all add the same.

        A block adds what it saves to all that runs between its forward and its backward, and what
        it keeps, such as gradients of a unit that is not complete, to all that runs later.
        """
        values = self.short.live_nbytes
        forward, backward = self.halves(values)
        saves, changes = self.step(forward), self.step(backward)
        if saves is None or changes is None:
            return None
        keeps = self.copies * (saves - changes)

        def raised(half: Sequence[int], step: int, all_of_them: int) -> list[int]:
            return [  # a moment at which nothing ran has 0
                value and value + all_of_them + copy * step for value, copy in self.spread(half)
            ]

        end = values[-1] and values[-1] + keeps
        return [*raised(forward, saves, 0), *reversed(raised(backward, changes, keeps)), end]

    def step(self, half: Sequence[int]) -> int | None:
        """How much more the third block has than the one before it; None if events differ."""
        size = self.end - self.begin
        pairs = [(half[i - size], half[i]) for i in range(self.begin, self.end)]
        steps = {after - before for before, after in pairs if before or after}
        return steps.pop() if len(steps) == 1 else None

    def backward(self) -> list[tuple[bool, int]] | None:
        """The backward's events; those between two blocks' first ones are repeated."""
        events = self.short.backward
        blocks = [
            self.block_of(index if ready else self.short.order[index][1]) for ready, index in events
        ]
        if not {_REPEATED - 1, _REPEATED} <= {*blocks}:
            return None
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


def _units_in(modules: list[nn.Module], planned: list[UnitPlanned]) -> list[list[int]] | None:
    """The units in each block; None where one has none, or a unit is in several of them."""
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
                return None
            found[block].append(number)
    sizes = {len(units) for units in found}
    return found if len(sizes) == 1 and sizes != {0} else None
