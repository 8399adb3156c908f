"""Blocks that layers write gradients to, and the scale of these, step by step."""

from __future__ import annotations

import pytest

from tests.plan.test_reduction import FP32, make, text, texts


def test_blocks_that_layers_write_to_are_taken_before_the_pack() -> None:
    reduction = make(3, fuse_wgrad=True)
    reduction.set_exact(0, 0, True)
    assert texts(reduction.prepare(0)) == [f"take full {FP32}"]
    assert texts(reduction.prepare(0)) == [] and reduction.place(0, 0) == "full"
    pack, start = (step for step in reduction.reduce(0) if step.kind in ("pack", "start"))
    assert (pack.scale, text(start)) == ("none", f"reduce_scatter full kept {FP32}")
    assert reduction.place(0, 0) is None and reduction.prepare(0) == []  # it is in flight
    assert texts(reduction.finish()) == ["wait", "sum kept kept", "give back full"]
    reduction.prepare(0)
    assert texts(reduction.finish()) == ["give back full"]  # nothing was reduced
    reduction.set_exact(0, 0, False)
    assert texts(reduction.prepare(0)) == [f"take full {FP32}"] and reduction.place(0, 0) is None


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_write_where_nothing_is_kept(stage: int) -> None:
    reduction = make(stage, fuse_wgrad=True)
    reduction.set_exact(0, 0, True)
    reduction.prepare(0, sync=False)
    assert reduction.place(0, 0) is None  # sums of this rank are shown
    reduction.prepare(0)
    assert reduction.place(0, 0) == "full"
    reduction.reduce(0)
    assert texts(reduction.finish()) == ["wait", "sum kept kept"]
    reduction.prepare(0)
    assert reduction.place(0, 0) is None  # what was reduced is added to
    assert [step.scale for step in reduction.reduce(0) if step.kind == "pack"] == ["all"]
    assert texts(reduction.finish()) == ["wait"]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_summed_here_is_scaled_with_the_sum(stage: int) -> None:
    for source, options in (
        ("scratch", {"backend": "gloo", "on_host": True}),
        ("scratch", {"sums_in_order": True}),
        ("wire", {"wired": True}),
    ):
        reduction = make(stage, fuse_wgrad=True, **options)
        reduction.set_exact(0, 0, True)
        reduction.prepare(0)
        reduction.reduce(0)
        sums = [step for step in reduction.finish() if step.kind == "sum"]
        assert [(step.source, step.scale) for step in sums] == [(source, "all")], options
