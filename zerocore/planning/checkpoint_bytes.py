"""Bytes of a checkpoint: of all ranks, of one rank's part, and of the host while it is written."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore._C import FileWriter
from zerocore.checkpoint.slices.save_ownership import Cut, SavedRanges
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner

MEMORY_BUDGET = 2 << 30  # of the copies of a background save, unless another one is asked for


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of the weights and of the optimizer's states of their size; without what frames them.

    Attributes:
        total: of all ranks.
        own: what this rank writes.
    """

    total: int
    own: int

    @property
    def host(self) -> int:
        """Memory on this rank's host that a background save takes: copies, and blocks to write."""
        blocks = FileWriter.RING_NBYTES if self.own > FileWriter.RING_NBYTES else 0
        return min(self.own, MEMORY_BUDGET) + blocks

    @property
    def near(self) -> int:
        """Memory that a node holds for this rank with ``zerocore.PeerCheckpoints``: its file and
        another rank's, of two checkpoints that stay and one that is written."""
        return 3 * 2 * self.own


def checkpoint_bytes(planner: Planner, division: Division) -> CheckpointBytes:
    """Bytes that ``zerocore.Checkpoints`` writes of a model and its optimizer."""
    total = own = 0
    rows = zip(planner.specs, planner.types, planner.layouts(division), strict=True)
    for unit, (specs, types, layout) in enumerate(rows):
        mesh = planner.mesh_of(unit)
        num_parts, rank = division.num_parts(mesh), division.rank
        if mesh > 0:
            rank = division.parts[mesh - 1][2]
        copies = division.world_size // num_parts // layout.num_shards
        for position, (spec, each) in enumerate(zip(specs, types, strict=True)):
            tensors = 1 + (planner.num_states if spec.requires_grad else 0)
            nbytes = tensors * each.main.itemsize
            total += nbytes * spec.numel * num_parts
            begin, end = SavedRanges(Cut.of(layout, position), copies).of(rank)
            own += nbytes * (end - begin)
    return CheckpointBytes(total, own)
