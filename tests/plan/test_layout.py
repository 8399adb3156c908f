"""Property tests of the layout: ownership, alignment, padding, bytes on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocore._C import Layout, ParamSpec

_DTYPES = {0: 4, 1: 8, 2: 2, 3: 1}  # number -> bytes of an element

_shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3)
_specs = st.lists(
    st.builds(
        lambda shape, dtype, grad: ("p", shape, dtype, _DTYPES[dtype], grad),
        _shapes,
        st.sampled_from(sorted(_DTYPES)),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
_worlds = st.one_of(st.integers(1, 8), st.integers(1, 1024))


def build(specs: list[tuple], num_shards: int) -> Layout:
    return Layout.build([ParamSpec(*spec) for spec in specs], num_shards)


@given(_specs, _worlds)
@settings(deadline=None, max_examples=150)
def test_every_element_is_owned_once(specs: list[tuple], world: int) -> None:
    layout = build(specs, world)
    for param, place in enumerate(layout.places):
        end = 0
        for owned in (layout.owned(param, rank) for rank in range(world)):
            if owned.begin == owned.end:
                continue
            assert owned.begin == end
            end = owned.end
        assert end == place.numel


@given(_specs, _worlds)
@settings(deadline=None, max_examples=150)
def test_alignment_and_equal_shards(specs: list[tuple], world: int) -> None:
    layout = build(specs, world)
    for region in layout.regions:
        assert region.shard_nbytes % 16 == 0
        assert region.nbytes == world * region.shard_nbytes
        for param in region.params:
            assert layout.places[param].offset * region.itemsize % 128 == 0
            assert layout.places[param].offset + layout.places[param].numel <= region.numel
    assert {(r.dtype, r.requires_grad) for r in layout.regions} == {(s[2], s[4]) for s in specs}


@given(_specs, st.integers(1, 6))
@settings(deadline=None, max_examples=80)
def test_round_trip_through_shards(specs: list[tuple], world: int) -> None:
    layout = build(specs, world)
    for index, region in enumerate(layout.regions):
        buffer: list[object] = [None] * region.numel
        for param in region.params:
            place = layout.places[param]
            for i in range(place.numel):
                buffer[place.offset + i] = (param, i)
        size = region.shard_numel
        shards = [buffer[rank * size : (rank + 1) * size] for rank in range(world)]
        for param in region.params:
            assert layout.places[param].region == index
            gathered = []
            for rank in range(world):
                owned = layout.owned(param, rank)
                offset = layout.offset_in_shard(param, rank)
                gathered += shards[rank][offset : offset + owned.end - owned.begin]
            assert gathered == [(param, i) for i in range(layout.places[param].numel)]


@pytest.mark.parametrize("world", [2, 3, 8, 64, 1000, 1024])
@pytest.mark.parametrize(("width", "hidden"), [(2560, 9728), (4096, 14336), (8192, 28672)])
def test_bytes_on_the_wire_of_real_blocks(world: int, width: int, hidden: int) -> None:
    shapes = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(hidden, width)] * 2
    shapes += [(width, hidden), (width,), (width,)]
    layout = build([(f"p{i}", list(shape), 0, 2, True) for i, shape in enumerate(shapes)], world)
    numel = sum(place.numel for place in layout.places)
    bound = 3 * numel * 2 * (world - 1) / world
    moved = 3 * layout.nbytes * (world - 1) / world
    assert bound <= moved <= 1.01 * bound


def test_of_shard_holds_the_owned_ranges() -> None:
    layout = build([("a", [5, 7], 0, 4, True), ("b", [], 0, 4, True), ("c", [3], 1, 8, False)], 4)
    for rank in range(4):
        part = layout.of_shard(rank)
        assert [r.nbytes for r in part.regions] == [r.shard_nbytes for r in layout.regions]
        for param in range(3):
            owned = layout.owned(param, rank)
            assert part.places[param].numel == owned.end - owned.begin


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="num_shards must be at least 1, got 0"):
        build([("a", [2], 0, 4, True)], 0)
    with pytest.raises(ValueError, match=r"parameter 'bad'.*got -1"):
        build([("bad", [2, -1], 0, 4, True)], 2)
    with pytest.raises(RuntimeError, match="overflow"):
        build([("huge", [2**40, 2**40], 0, 4, True)], 2)
