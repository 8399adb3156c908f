"""Bytes beside a step's memory, of a model that is not sharded yet: of a checkpoint, and those that
``zerocore.optim.Muon`` sends in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerocore._C import FileWriter
from zerocore.checkpoint.slices.save_ownership import Cut, SavedRanges
from zerocore.planning.division import Division
from zerocore.planning.ownership import Grid, Matrix, newton_schulz_cost, plan_rounds
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


_ITEMSIZE = 2  # bfloat16


def exchanged_nbytes(planner: Planner, division: Division) -> int:
    """Bytes that the division's rank sends if Muon trains all matrices, chosen by their shape;
    raises ValueError if replicas share the optimizer's states."""
    if division.communication.replicas_share is not None:
        raise ValueError("replicas_share='optimizer' is not built for Muon; leave it out")
    shared = division.placements.optimizer
    levels = (division.num_replicas,) if shared else (division.num_shards, division.num_replicas)
    grid = Grid(division.num_shards if shared else 1, tuple(size for size in levels if size > 1))
    matrices, cuts = [], {}
    layouts = planner.layouts(division)
    for number, (unit, position) in enumerate(_trained(planner)):
        spec = planner.specs[unit][position]
        matrices += list(_matrices(number, spec.fqn, spec.shape))
        cut = Cut.of(layouts[unit], position)
        cuts[number] = cut if shared else Cut.whole(cut.numel)
    rounds = plan_rounds(matrices, cuts, grid, division.rank, _ITEMSIZE)
    return sum(each.sent_to_owners() + each.sent_to_shards() for each in rounds) * _ITEMSIZE


def _trained(planner: Planner) -> Iterator[tuple[int, int]]:
    for unit, specs in enumerate(planner.specs):
        for position, spec in enumerate(specs):
            if spec.requires_grad and len(spec.shape) in (2, 3):
                yield unit, position


def _matrices(number: int, name: str, shape: list[int]) -> Iterator[Matrix]:
    rows, columns = shape[-2:]
    numel, count = rows * columns, shape[0] if len(shape) == 3 else 1
    for index in range(count if numel else 0):
        begin, cost = index * numel, newton_schulz_cost((rows, columns))
        yield Matrix(number, begin, begin + numel, (rows, columns), cost, name)
