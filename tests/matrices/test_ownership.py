"""Owners and rounds of whole matrices: every element arrives once, work and rounds are even."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocore.layout.cuts import Cut
from zerocore.matrices.ownership import (
    Grid,
    Matrix,
    Round,
    assign,
    cut_rounds,
    newton_schulz_cost,
    plan_rounds,
)

GPT_10M = [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 12
_grids = st.builds(Grid, st.integers(1, 4), st.lists(st.integers(1, 3), max_size=2).map(tuple))
_numels = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_largest_first_is_within_a_third_of_the_best(costs: list[int], num_owners: int) -> None:
    costs = sorted(costs, reverse=True)
    loads = [0] * num_owners
    owners = assign(costs, loads)
    assert loads == loads_of(costs, owners, num_owners)
    choices = product(range(num_owners), repeat=len(costs))
    best = min(max(loads_of(costs, choice, num_owners)) for choice in choices)
    assert 3 * max(loads) <= 4 * best


def loads_of(costs: Sequence[int], owners: Sequence[int], num_owners: int) -> list[int]:
    pairs = list(zip(costs, owners, strict=True))
    return [sum(cost for cost, own in pairs if own == owner) for owner in range(num_owners)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_work_of_a_gpt_is_even(num_ranks: int) -> None:
    loads = [0] * num_ranks
    assign(sorted(map(newton_schulz_cost, GPT_10M), reverse=True), loads)
    assert max(loads) <= 1.1 * sum(loads) / num_ranks


@given(st.lists(st.integers(0, 1 << 22), max_size=40), st.integers(1, 8))
def test_rounds_are_all_entries_in_order(nbytes: list[int], num_ranks: int) -> None:
    rounds = cut_rounds(nbytes, num_ranks)
    assert [index for cut in rounds for index in cut] == list(range(len(nbytes)))
    limit = max(sum(nbytes) // 4, num_ranks << 20)
    for cut in rounds:
        assert len(cut) > 0
        has_bytes = [nbytes[i] for i in cut if nbytes[i] > 0]
        assert sum(has_bytes) <= limit or len(has_bytes) == 1
    for cut, after in pairwise(rounds):
        assert sum(nbytes[i] for i in cut) + nbytes[after.start] > limit


def rounds_on_all(grid: Grid, numels: list[int]) -> list[list[Round]]:
    """Parameters of two matrices each, cut evenly over the shards, as every rank sees them."""
    matrices, cuts = [], {}
    for param, numel in enumerate(numels):
        matrices += [Matrix(param, at, at + numel, (1, numel), numel) for at in (0, numel)]
        step = -(-2 * numel // grid.num_shards)
        cuts[param] = Cut(2 * numel, max(step, 1), num_shards=grid.num_shards)
    return [plan_rounds(matrices, cuts, grid, rank, 1 << 19) for rank in range(grid.num_ranks)]


@given(_grids, _numels)
@settings(deadline=None, max_examples=100)
def test_messages_fit_and_all_elements_arrive(grid: Grid, numels: list[int]) -> None:
    everywhere = rounds_on_all(grid, numels)
    for number, first in enumerate(everywhere[0]):
        steps = [rounds[number] for rounds in everywhere]
        assert all(step.owners == first.owners for step in steps)
        for step in steps:
            shard, *here = grid.places(step.rank)
            replica = [other for other in steps if grid.places(other.rank)[1:] == tuple(here)]
            received = [other.elements_to_owners()[shard] for other in replica]
            assert step.elements_from_shards() == received
            assert sum(received) == sum(step.matrices[index].numel for index in step.mine)
            assert_spread_is_complete(step)
        # Each element of a result goes to every rank that has it and did not compute it.
        sent = sum(step.sent_to_owners() + step.sent_to_shards() for step in steps)
        assert sent == sum(
            map(elements_to_move, [first] * len(first.owners), range(len(first.owners)))
        )


def assert_spread_is_complete(step: Round) -> None:
    held = {index for owned in step.by_shard for index in owned}
    for place, found in step.spreads:
        assert set(found[place]) == held
        held = {index for indices in found for index in indices}
    assert held == set(range(len(step.matrices)))


def elements_to_move(step: Round, index: int) -> int:
    """Elements of one matrix that must cross a link in a step, there and back."""
    own = step.grid.places(step.owners[index])[0]
    parts = step.matrices[index].parts(step.cuts[index])
    to_owner = sum(end - begin for shard, begin, end in parts if shard != own)
    num_replicas = step.grid.num_ranks // step.grid.num_shards
    return 2 * to_owner + (num_replicas - 1) * step.matrices[index].numel


@pytest.mark.parametrize("num_ranks", [2**power for power in range(1, 15)])
def test_a_rank_counts_its_own_parts(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One range of each matrix, and those of the matrices that the rank owns."""
    numel = 1 << 20
    matrices = [Matrix(param, 0, numel, (1 << 10, 1 << 10), 1) for param in range(64)]
    cuts = {param: Cut(numel, numel // num_ranks, num_shards=num_ranks) for param in range(64)}
    counted = []
    part, parts = Matrix.part, Matrix.parts

    def counting(*args: Any) -> Iterator[tuple[int, int, int]]:
        for each in parts(*args):
            counted.append(1)
            yield each

    monkeypatch.setattr(Matrix, "part", lambda *args: counted.append(1) or part(*args))
    monkeypatch.setattr(Matrix, "parts", counting)
    for step in plan_rounds(matrices, cuts, Grid(num_ranks), 0, 2):
        assert sum(step.elements_to_owners()) == sum(end - begin for begin, end in step.own_parts)
        assert sum(step.elements_from_shards()) == numel * len(step.mine)
    assert len(counted) == 64 + num_ranks * -(-64 // num_ranks)
