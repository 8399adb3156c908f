"""Bytes that ``zerocore.optim.Muon`` sends in a step, of a model that is not sharded yet."""

from __future__ import annotations

from collections.abc import Iterator

from zerocore.checkpoint.slices.save_ownership import Cut
from zerocore.planning.division import Division
from zerocore.planning.ownership import Grid, Matrix, newton_schulz_cost, plan_rounds
from zerocore.planning.planner import Planner

_ITEMSIZE = 2  # bfloat16


def exchanged_nbytes(planner: Planner, division: Division) -> int:
    """Bytes that the division's rank sends if Muon trains all matrices, chosen by their shape.

    Raises:
        ValueError: replicas share the optimizer's states.
    """
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
