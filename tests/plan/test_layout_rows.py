"""Shards of rows: what each rank owns is torch.chunk's part, on the wire as in the full buffer."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bindings import _C_testing
from zerocore._C import Layout, ParamSpec

_shapes = st.lists(st.integers(0, 20), min_size=1, max_size=3)
_params = st.lists(st.tuples(_shapes, st.sampled_from([(0, 4), (2, 2)])), min_size=1, max_size=8)
_worlds = st.integers(1, 12)


def build(params: list[tuple], world: int) -> Layout:
    specs = [ParamSpec("p", shape, dtype, size, True) for shape, (dtype, size) in params]
    return Layout.build(specs, world, by_rows=True)


@given(_params, _worlds)
@settings(deadline=None, max_examples=150)
def test_each_rank_owns_the_rows_of_torch_chunk(params: list[tuple], world: int) -> None:
    layout = build(params, world)
    for index, (shape, _) in enumerate(params):
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = [chunk.flatten().tolist() for chunk in full.chunk(world)]
        chunks += [[]] * (world - len(chunks))
        parts = [layout.owned(index, rank) for rank in range(world)]
        assert [list(range(part.begin, part.end)) for part in parts] == chunks


@given(_params, _worlds)
@settings(deadline=None, max_examples=150)
def test_parts_of_a_shard_lie_apart_and_aligned(params: list[tuple], world: int) -> None:
    layout = build(params, world)
    assert layout.by_rows
    for region in layout.regions:
        assert region.shard_nbytes % 16 == 0
        full_end = 0
        for param in region.params:
            place = layout.places[param]
            assert place.offset >= full_end
            assert place.offset * region.itemsize % 128 == 0
            full_end = place.offset + place.numel
        assert full_end <= region.numel
        for rank in range(world):
            end = 0
            for param in region.params:
                owned = layout.owned(param, rank)
                if owned.begin < owned.end:
                    offset = layout.offset_in_shard(param, rank)
                    assert offset >= end
                    end = offset + owned.end - owned.begin
            assert end * region.itemsize <= region.shard_nbytes


def elements(begin: int, numel: int, run: int, stride: int) -> list[int]:
    """Where each of them lies on the wire."""
    return [begin + each // run * stride + each % run for each in range(numel)]


@given(_params, _worlds)
@settings(deadline=None, max_examples=150)
def test_runs_are_the_rows_of_each_rank_and_gaps_are_the_rest(
    params: list[tuple], world: int
) -> None:
    layout = build(params, world)
    for index, region in enumerate(layout.regions):
        rows, gaps = _C_testing.wire_runs(layout, index)
        wire = []
        for param, runs in zip(region.params, rows, strict=True):
            expected = []
            for rank in range(world):
                owned = layout.owned(param, rank)
                begin = rank * region.numel // world + layout.offset_in_shard(param, rank)
                expected += range(begin, begin + owned.end - owned.begin)
            assert elements(*runs) == expected
            wire += expected
        for gap in gaps:
            wire += elements(*gap)
        assert sorted(wire) == list(range(region.numel))


def test_a_segment_a_parameter_however_many_ranks_there_are() -> None:
    params = [([4096, 3], (0, 4)), ([4096], (0, 4)), ([100, 7], (0, 4))]
    counts = set()
    for world in (64, 1024, 2048):
        rows, gaps = _C_testing.wire_runs(build(params, world), 0)
        assert len(rows) == len(params)
        counts.add(len(gaps))
    assert max(counts) <= 3 * len(params) + 1


def test_what_lies_alike_is_not_copied() -> None:
    wide, odd = ([8, 4], (0, 4)), ([3], (0, 4))
    assert not build([wide], 4).copies_out  # one parameter, equal and aligned parts
    assert not build([wide, odd], 1).copies_out
    assert build([wide, odd], 4).copies_out
    assert build([odd], 2).copies_out  # padded to the alignment of shards
    assert not build([wide, ([8, 4], (2, 2))], 4).copies_out  # two regions of one each
