"""Plans the bytes of a checkpoint and of Muon's exchange, for a model that is not sharded yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerocore._C import FileWriter, ParamSpec
from zerocore.checkpoint.checkpoints import MEMORY_BUDGET
from zerocore.layout.cuts import Cut
from zerocore.layout.save_ownership import SavedRanges
from zerocore.matrices.ownership import Grid, Matrix, newton_schulz_cost, plan_rounds
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of the weights and of optimizer states of their size; file headers do not count.

    Attributes:
        total: bytes that all ranks write.
        own: bytes that this rank writes.
    """

    total: int
    own: int

    @property
    def host(self) -> int:
        """Host memory that this rank's background save takes: copies, and blocks to write."""
        blocks = FileWriter.RING_NBYTES if self.own > FileWriter.RING_NBYTES else 0
        return min(self.own, MEMORY_BUDGET) + blocks

    @property
    def near(self) -> int:
        """Node memory that ``zerocore.recovery.PeerCheckpoints`` takes for each rank: two files
        (its own and another rank's) of three checkpoints (two complete, one being written)."""
        return 3 * 2 * self.own


def checkpoint_bytes(planner: Planner, division: Division) -> CheckpointBytes:
    """Returns the bytes that ``zerocore.Checkpoints`` writes for a model and its optimizer."""
    total = own_nbytes = 0
    for unit, layout in zip(planner.units, planner.layouts(division), strict=True):
        num_parts, rank = division.num_parts(unit.mesh), division.rank
        if unit.mesh > 0:
            rank = division.parts[unit.mesh - 1][2]
        copies = division.world_size // num_parts // layout.num_shards
        for position, (spec, types) in enumerate(zip(unit.specs, unit.types, strict=True)):
            tensors = 1 + (planner.num_states if spec.requires_grad else 0)
            nbytes = tensors * types.main.itemsize
            total += nbytes * spec.numel * num_parts
            begin, end = SavedRanges(Cut.of(layout, position), copies).of(rank)
            own_nbytes += nbytes * (end - begin)
    return CheckpointBytes(total, own_nbytes)


_ITEMSIZE = 2  # bfloat16


def exchanged_nbytes(planner: Planner, division: Division) -> int:
    """Returns the bytes that the division's rank sends if Muon trains all matrices, chosen by their
    shape. Raises ValueError if replicas share the optimizer's states."""
    if division.communication.replicas_share is not None:
        raise ValueError("replicas_share='optimizer' is not supported for Muon; leave it out")
    shared = division.placements.optimizer
    levels = (division.num_replicas,) if shared else (division.num_shards, division.num_replicas)
    grid = Grid(division.num_shards if shared else 1, tuple(size for size in levels if size > 1))
    matrices: list[Matrix] = []
    cuts: dict[int, Cut] = {}
    for unit, layout in zip(planner.units, planner.layouts(division), strict=True):
        for position, spec in enumerate(unit.specs):
            if spec.requires_grad and len(spec.shape) in (2, 3):
                matrices += _matrices(len(cuts), spec)
                cut = Cut.of(layout, position)
                cuts[len(cuts)] = cut if shared else Cut.whole(cut.numel)
    rounds = plan_rounds(matrices, cuts, grid, division.rank, _ITEMSIZE)
    return sum(step.sent_to_owners() + step.sent_to_shards() for step in rounds) * _ITEMSIZE


def _matrices(number: int, spec: ParamSpec) -> Iterator[Matrix]:
    rows, columns = spec.shape[-2:]
    numel, cost = rows * columns, newton_schulz_cost((rows, columns))
    for begin in range(0, spec.numel, numel) if numel else ():
        yield Matrix(number, begin, begin + numel, (rows, columns), cost, spec.fqn)
