"""Plans which rank owns which matrix and the messages for it, with integers only.

Note [Whole matrices]
A shard is a range of a parameter's elements. An update that needs the whole matrix is computed by
one rank, its owner. In each round the ranks of a replica send their elements of some matrices to
the owners (one all-to-all); the owners compute, and send each rank its elements of the results
(a second all-to-all). Replicas divide the matrices among them, and then send each other their
results, in one all-to-all for each dimension of replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from zerocore.layout.cuts import Cut

# Bytes for each rank: enough to hide latency, and few enough for a small staging memory.
_MIN_ROUND_NBYTES, _MAX_ROUND_NBYTES = 1 << 20, 64 << 20
_WANTED_ROUNDS = 4  # several, as a round's exchange overlaps the previous round's work


@dataclass(frozen=True)
class Matrix:
    """A contiguous range of a parameter's elements that one rank needs as a whole.

    Attributes:
        param: index of the optimizer's parameter.
        begin, end: the range in the flattened parameter.
        shape: shape of the matrix.
        cost: work on the matrix, in any unit.
        name: name of the parameter.
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
        """Returns the matrix's elements in a shard of the parameter, counted from its first."""
        owned = cut.owned(shard)
        begin = min(max(owned[0], self.begin), self.end)
        return begin - self.begin, min(max(owned[1], begin), self.end) - self.begin

    def parts(self, cut: Cut) -> Iterator[tuple[int, int, int]]:
        """Yields ``(shard, begin, end)`` for each shard that has some of its elements."""
        for shard, begin, end in cut.ranges(self.begin, self.end):
            yield shard, begin - self.begin, end - self.begin


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh: one dimension of shards, and any number of replicas'."""

    num_shards: int = 1
    replicas: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.num_shards * prod(self.replicas)

    def places(self, rank: int) -> tuple[int, ...]:
        """Returns a rank's coordinates: its shard, then one for each dimension of replicas."""
        coordinates = []
        for size in (self.num_shards, *self.replicas):
            rank, place = divmod(rank, size)
            coordinates.append(place)
        return tuple(coordinates)


def newton_schulz_cost(shape: Sequence[int], steps: int = 5) -> int:
    """Counts multiplications to orthogonalise x: x x^T, its square, and their product with x."""
    short, long = sorted(shape)
    return steps * short * short * (2 * long + short)


def whole_cost(shape: Sequence[int]) -> int:
    """Returns the cost of multiplying a tensor by its preconditioners, or of reading a vector."""
    sizes = [size for size in shape if size > 1]
    return prod(sizes) * (sum(sizes) if len(sizes) > 1 else 1)


def assign(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Returns an owner for each cost, each time the least loaded, and adds to its ``loads``.

    Largest first, and without earlier loads, no load exceeds 4/3 of the optimum (Graham 1969).
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
    """Cuts consecutive entries into rounds that are exchanged together, by their bytes."""
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
    """Matrices that are exchanged together, and their owners, as one rank sees them.

    Attributes:
        matrices: the matrices, in their order in all messages.
        owners: the rank that owns each matrix.
        cuts: how each matrix's parameter is cut into shards.
        grid, rank: the ranks, and this rank.
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
        elements in the shard."""
        by_shard: dict[int, list[tuple[int, int, int]]] = {}
        for index in self.mine:
            for shard, begin, end in self.matrices[index].parts(self.cuts[index]):
                by_shard.setdefault(shard, []).append((index, begin, end))
        return dict(sorted(by_shard.items()))

    @cached_property
    def mine(self) -> list[int]:
        """Indices of the matrices that this rank owns."""
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    @cached_property
    def by_shard(self) -> list[list[int]]:
        """Indices of the matrices that each rank of this replica owns, by its shard."""
        return self._along(0, self.grid.num_shards)

    @cached_property
    def spreads(self) -> list[tuple[int, list[list[int]]]]:
        """For each dimension of replicas, this rank's coordinate and each rank's matrices."""
        here = self.grid.places(self.rank)
        sizes = enumerate(self.grid.replicas, 1)
        return [(here[level], self._along(level, size)) for level, size in sizes]

    def _along(self, level: int, size: int) -> list[list[int]]:
        """Returns each rank's matrices after the exchanges of earlier levels; 0 is the shards."""
        by_rank: list[list[int]] = [[] for _ in range(size)]
        here = self.grid.places(self.rank)[level + 1 :]
        for index, owner in enumerate(self.owners):
            place, *beyond = self.grid.places(owner)[level:]
            if tuple(beyond) == here:
                by_rank[place].append(index)
        return by_rank

    @property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return self.rank % self.grid.num_shards

    def own_numel(self, indices: Sequence[int]) -> int:
        """Returns the number of this rank's elements of some matrices."""
        return sum(self.own_parts[index][1] - self.own_parts[index][0] for index in indices)

    # -- elements of messages ---------------------------------------------------------------------

    def elements_to_owners(self) -> list[int]:
        """Returns how many elements this rank sends to each owner in its replica, by shard."""
        return [self.own_numel(owned) for owned in self.by_shard]

    def elements_from_shards(self) -> list[int]:
        """Returns how many elements this rank receives from each shard for its own matrices."""
        counts = [0] * self.grid.num_shards
        for shard, parts in self.parts_of_mine.items():
            counts[shard] = sum(end - begin for _, begin, end in parts)
        return counts

    @property
    def exchanged_numel(self) -> int:
        """Elements of this replica's matrices, the same number on all its ranks."""
        return sum(self.matrices[index].numel for owned in self.by_shard for index in owned)

    def sent_to_owners(self) -> int:
        """Returns the elements that this rank sends to other ranks, the owners."""
        counts = self.elements_to_owners()
        return sum(counts) - counts[self.shard]

    def sent_to_shards(self) -> int:
        """Returns the elements of results that this rank sends to other ranks."""
        counts = self.elements_from_shards()
        spread = sum(
            (len(by_rank) - 1) * self.own_numel(by_rank[place]) for place, by_rank in self.spreads
        )
        return sum(counts) - counts[self.shard] + spread


def plan_rounds(
    matrices: Sequence[Matrix], cuts: Mapping[int, Cut], grid: Grid, rank: int, itemsize: int
) -> list[Round]:
    """Chooses owners and makes rounds, for matrices that may have other owners in each step.

    Args:
        cuts: how each parameter is cut into shards.
        rank: this rank in ``grid``.
        itemsize: bytes of an element on the wire.
    """
    # Sorts by names, which sharding does not change. A transpose sorts as its matrix.
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
    """Makes rounds of matrices in this order, each with its owner."""
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
