"""The plan and metadata of the last save, which the next save of the same tensors uses."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import torch

from zerocore.checkpoint.dcp.save_plan import SavePlan, Spread
from zerocore.checkpoint.slices.save_ownership import Cut, SavedRanges
from zerocore.model.parts import check_has_places
from zerocore.model.state import ShardState
from zerocore.tensor.place import Place

Facts = Mapping[str, tuple[torch.dtype, Place | torch.Size]]


class KeptPlan:
    """The plan of the last save of a model, and its metadata as they stand in the file."""

    def __init__(self, state: ShardState) -> None:
        self._places = {
            param.fqn: (layout, position)
            for unit, layout in [(unit, state.engine.layout(unit.index)) for unit in state.units]
            for position, param in enumerate(unit.params)
        }
        self._ranks = state.ranks
        self._parts = state.part_ranges
        check_has_places(state)
        self._spreads: dict[Any, Spread] = {}
        self._lock = threading.Lock()  # one thread copies by the plan, another one writes by it
        self._facts: Facts = {}
        self._plan = SavePlan({}, state.ranks.world_size)
        self._written: tuple[Any, ...] = ()
        self._metadata = b""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def plan_of(self, facts: Facts) -> SavePlan:
        """The plan of a save; the same object as long as the same tensors are saved."""
        with self._lock:
            if facts is not self._facts:
                tensors = {key: (dtype, self._spread(of)) for key, (dtype, of) in facts.items()}
                plan = SavePlan(tensors, self._ranks.world_size)
                self._plan = self._plan if plan == self._plan else plan
                self._facts = facts
            return self._plan

    def metadata(
        self, plan: SavePlan, values: Mapping[str, tuple[int, int]], paths: Mapping[str, Any]
    ) -> bytes:
        """``plan.metadata(values, paths)`` pickled; kept as long as they are the same."""
        if (plan, values, paths) != self._written:
            self._metadata = pickle.dumps(plan.metadata(values, paths))
            self._written = plan, values, paths
        return self._metadata

    def _spread(self, of: Place | torch.Size) -> Spread:
        """One object for all tensors that are spread alike."""
        key: Any = of
        if isinstance(of, Place):
            key = (of.fqn, of.whole_shape, of.strides, of.shard_range, of.group is None)
        if key not in self._spreads:
            self._spreads[key] = self._found(of)
        return self._spreads[key]

    def _found(self, of: Place | torch.Size) -> Spread:
        if not isinstance(of, Place):
            return Spread(tuple(of), SavedRanges(Cut.whole(of.numel())))
        if of.part is not None:
            parts = tuple(
                (part.origin, Spread(part.shape, part.ranges, of.strides))
                for part in self._parts[of.fqn]
            )
            return Spread(tuple(of.whole_shape), strides=of.strides, parts=parts)
        layout = None if of.group is None else self._places[of.fqn]
        ranges = SavedRanges.on(self._ranks, of.global_shape.numel(), layout)
        return Spread(tuple(of.global_shape), ranges, of.strides)
