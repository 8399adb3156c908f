"""Chunks cover every element once, whatever the sizes; vectors begin at aligned addresses."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bindings import _C_testing
from zerocore._C import CHUNK_NUMEL

_sizes = st.one_of(
    st.integers(0, 20), st.integers(CHUNK_NUMEL - 2, CHUNK_NUMEL + 2), st.integers(0, 200_000)
)


_chunk_numels = st.sampled_from([CHUNK_NUMEL, 4 * CHUNK_NUMEL])  # of single bytes, too


@given(st.lists(_sizes, max_size=60), _chunk_numels)
@settings(deadline=None)
def test_chunks_cover_each_segment_in_order(numels: list[int], chunk_numel: int) -> None:
    chunks = _C_testing.kernel_chunks(numels, chunk_numel)
    assert all(0 < c.elements.end - c.elements.begin <= chunk_numel for c in chunks)
    full = [numel for numel in numels if numel > 0]
    covered = [0] * len(full)
    for chunk in chunks:
        assert chunk.elements.begin == covered[chunk.segment]
        assert covered[chunk.segment + 1 :] == [0] * (len(full) - chunk.segment - 1)
        covered[chunk.segment] = chunk.elements.end
    assert covered == full


@given(st.integers(1, 60_000), st.integers(1, 50_000), _chunk_numels)
@settings(deadline=None, max_examples=200)
def test_chunks_cover_each_run_in_order(numel: int, run: int, chunk_numel: int) -> None:
    covered = 0
    for chunk in _C_testing.kernel_run_chunks(numel, run, chunk_numel):
        assert 0 < chunk.elements.end - chunk.elements.begin <= chunk_numel
        assert chunk.segment * run + chunk.elements.begin == covered
        assert chunk.elements.end <= run
        covered = chunk.segment * run + chunk.elements.end
    assert covered == numel


@given(
    st.integers(0, 100),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 100),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, CHUNK_NUMEL),
)
def test_vectors_are_aligned_and_as_many_as_fit(
    dst: int, dst_itemsize: int, src: int, src_itemsize: int, numel: int
) -> None:
    split = _C_testing.kernel_vector_split(dst, dst_itemsize, src, src_itemsize, numel)
    head, num_vectors = split.head, split.num_vectors
    lanes = 16 // max(dst_itemsize, src_itemsize)
    dst_group, src_group = lanes * dst_itemsize, lanes * src_itemsize
    assert 0 <= head <= numel
    assert head + num_vectors * lanes <= numel
    if num_vectors == 0:
        possible = any(
            (dst + i * dst_itemsize) % dst_group == 0 and (src + i * src_itemsize) % src_group == 0
            for i in range(lanes)
        )
        assert not possible or numel < 2 * lanes
        return
    assert (dst + head * dst_itemsize) % dst_group == 0
    assert (src + head * src_itemsize) % src_group == 0
    assert numel - head - num_vectors * lanes < lanes
