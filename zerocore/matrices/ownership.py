"""Plans which rank gets which matrix whole, and what travels for it: integers only.

Note [Whole matrices]
A shard is a range of a parameter's elements, and an update that needs the whole matrix is computed
by one rank, its owner. In each round the ranks of one replica send their elements of some matrices
to the owners (one all-to-all), the owners compute, and send each rank its elements of the result
(another one). Ranks that hold the same elements divide the matrices, too: what a replica has
computed is then spread to the others, one all-to-all for each dimension of replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from zerocore.layout.save_ownership import Cut

# Rounds are so large that latency does not count, and so small that their staging memory does not.
_MIN_ROUND_NBYTES, _MAX_ROUND_NBYTES = 1 << 20, 64 << 20
_WANTED_ROUNDS = 4  # a round's exchange runs under the work of the one before


@dataclass(frozen=True)
class Matrix:
    """A run of a parameter's elements that one rank needs whole.

    Attributes:
        param: which of the optimizer's parameters.
        begin, end: its elements, of the flattened parameter.
        shape: of the matrix.
        cost: of the work on it, in any unit.
        name: of the parameter.
    """

    param: int
    begin: int
    end: int
    shape: tuple[int, ...]
    cost: int
    name: str = ""

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def part(self, cut: Cut, shard: int) -> tuple[int, int]:
        """Those of its elements that lie in a shard of the parameter; counted from its first."""
        owned = cut.owned(shard)
        begin = min(max(owned[0], self.begin), self.end)
        return begin - self.begin, min(max(owned[1], begin), self.end) - self.begin

    def parts(self, cut: Cut) -> Iterator[tuple[int, int, int]]:
        """``(shard, begin, end)`` of the shards that have some of them."""
        for shard, begin, end in cut.ranges(self.begin, self.end):
            yield shard, begin - self.begin, end - self.begin


@dataclass(frozen=True)
class Grid:
    """The ranks: one dimension over which parameters are cut, others whose ranks hold the same."""

    num_shards: int = 1
    replicas: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.num_shards * prod(self.replicas)

    def places(self, rank: int) -> tuple[int, ...]:
        """A rank's shard, and its place along each dimension of replicas."""
        found = []
        for size in (self.num_shards, *self.replicas):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(found)


def newton_schulz_cost(shape: Sequence[int], steps: int = 5) -> int:
    """Multiplications to orthogonalise a matrix: x x^T, its square, and their product with x."""
    short, long = sorted(shape)
    return steps * short * short * (2 * long + short)


def whole_cost(shape: Sequence[int]) -> int:
    """Of one product of a tensor with its preconditioners, or of reading a vector."""
    sizes = [size for size in shape if size > 1]
    return prod(sizes) * (sum(sizes) if len(sizes) > 1 else 1)


def assign(costs: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each cost: in turn the one with the least work so far, counted in ``loads``.

    Give the largest first: no owner then has more than 4/3 of the best possible (Graham 1969).
    """
    heap = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = []
    for cost in costs:
        load, owner = heap[0]
        heapq.heapreplace(heap, (load + cost, owner))
        loads[owner] = load + cost
        owners.append(owner)
    return owners


def cut_rounds(nbytes: Sequence[int], num_ranks: int) -> list[range]:
    """Consecutive entries that are exchanged together, by what each weighs."""
    wanted = sum(nbytes) // _WANTED_ROUNDS
    limit = min(max(wanted, _MIN_ROUND_NBYTES * num_ranks), _MAX_ROUND_NBYTES * num_ranks)
    rounds, begin, held = [], 0, 0
    for index, size in enumerate(nbytes):
        if held and held + size > limit:
            rounds.append(range(begin, index))
            begin, held = index, 0
        held += size
    return [*rounds, range(begin, len(nbytes))] if nbytes else []


@dataclass(frozen=True)
class Round:
    """Matrices that are exchanged together, and their owners, from the view of one rank.

    Attributes:
        matrices: in the order in which they lie in all messages.
        owners: the rank of each.
        cuts: of the parameter of each matrix, over the shards.
        grid, rank: the ranks, and which one this is.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    cuts: tuple[Cut, ...]
    grid: Grid
    rank: int

    @cached_property
    def own_parts(self) -> list[tuple[int, int]]:
        """This rank's elements of each matrix."""
        pairs = zip(self.matrices, self.cuts, strict=True)
        return [matrix.part(cut, self.shard) for matrix, cut in pairs]

    @cached_property
    def parts_of_mine(self) -> dict[int, list[tuple[int, int, int]]]:
        """By shard, ``(index, begin, end)`` of the matrices that this rank owns and that have
        elements there."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for index in self.mine:
            for shard, begin, end in self.matrices[index].parts(self.cuts[index]):
                found.setdefault(shard, []).append((index, begin, end))
        return dict(sorted(found.items()))

    @cached_property
    def mine(self) -> list[int]:
        """Which of the matrices this rank owns."""
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    @cached_property
    def by_shard(self) -> list[list[int]]:
        """Which matrices each shard of this rank's replica owns."""
        return self._along(0, self.grid.num_shards)

    @cached_property
    def spreads(self) -> list[tuple[int, list[list[int]]]]:
        """For each dimension of replicas this rank's place, and what each rank along it has."""
        here = self.grid.places(self.rank)
        sizes = enumerate(self.grid.replicas, 1)
        return [(here[level], self._along(level, size)) for level, size in sizes]

    def _along(self, level: int, size: int) -> list[list[int]]:
        """Matrices that each rank along a dimension has of those before it; 0 are the shards."""
        found: list[list[int]] = [[] for _ in range(size)]
        here = self.grid.places(self.rank)[level + 1 :]
        for index, owner in enumerate(self.owners):
            place, *beyond = self.grid.places(owner)[level:]
            if tuple(beyond) == here:
                found[place].append(index)
        return found

    @property
    def shard(self) -> int:
        """Which shard this rank has."""
        return self.rank % self.grid.num_shards

    def own_numel(self, indices: Sequence[int]) -> int:
        """This rank's elements of some of the matrices."""
        return sum(self.own_parts[index][1] - self.own_parts[index][0] for index in indices)

    # -- elements of messages ---------------------------------------------------------------------

    def elements_to_owners(self) -> list[int]:
        """Elements that this rank sends to each shard for matrices that those own."""
        return [self.own_numel(owned) for owned in self.by_shard]

    def elements_from_shards(self) -> list[int]:
        """Elements that each shard sends to this rank for matrices that this one owns."""
        counts = [0] * self.grid.num_shards
        for shard, parts in self.parts_of_mine.items():
            counts[shard] = sum(end - begin for _, begin, end in parts)
        return counts

    @property
    def exchanged_numel(self) -> int:
        """Elements of the matrices that this rank's replica owns: the same on all its ranks."""
        return sum(self.matrices[index].numel for owned in self.by_shard for index in owned)

    def sent_to_owners(self) -> int:
        """Elements that leave this rank for the owners."""
        counts = self.elements_to_owners()
        return sum(counts) - counts[self.shard]

    def sent_to_shards(self) -> int:
        """Elements that leave this rank with the results."""
        counts = self.elements_from_shards()
        spread = sum(
            (len(found) - 1) * self.own_numel(found[place]) for place, found in self.spreads
        )
        return sum(counts) - counts[self.shard] + spread


def plan_rounds(
    matrices: Sequence[Matrix], cuts: Mapping[int, Cut], grid: Grid, rank: int, itemsize: int
) -> list[Round]:
    """Owners and rounds of matrices whose owners may be others in another step.

    Args:
        cuts: of each parameter, over the shards.
        rank: this rank in ``grid``.
        itemsize: bytes of an element on its way.
    """
    # By names, which are the same before a model is sharded; a transpose is as its matrix.
    ordered = sorted(matrices, key=lambda m: (-m.cost, sorted(m.shape), m.name, m.begin))
    owners = assign([matrix.cost for matrix in ordered], [0] * grid.num_ranks)
    return make_rounds(ordered, owners, cuts, grid, rank, itemsize)


def make_rounds(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    cuts: Mapping[int, Cut],
    grid: Grid,
    rank: int,
    itemsize: int,
) -> list[Round]:
    """Rounds of matrices in this order, each with its owner."""
    rounds = cut_rounds([matrix.numel * itemsize for matrix in matrices], grid.num_ranks)
    return [
        Round(
            tuple(matrices[each.start : each.stop]),
            tuple(owners[each.start : each.stop]),
            tuple(cuts[matrix.param] for matrix in matrices[each.start : each.stop]),
            grid,
            rank,
        )
        for each in rounds
    ]
