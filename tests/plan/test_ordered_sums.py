"""Sums in the order of ranks, decided on integers: an exchange, a sum, a gather of the rest."""

from __future__ import annotations

from typing import Any

from tests.bindings import _C_testing
from tests.plan.test_reduction import FP32, WORLD, make, texts


def in_order(stage: int, **options: Any) -> _C_testing.Reduction:
    return make(stage, sums_in_order=True, **options)


def test_sums_in_order_are_an_exchange_and_a_sum_on_any_backend() -> None:
    for stage in (1, 2, 3):
        reduction = in_order(stage)
        assert texts(reduction.reduce(0)) == [
            f"take wire {FP32}",
            "pack wire",
            f"take scratch {FP32}",
            f"reduce_scatter wire scratch {FP32} 4 parts",
        ]
        given = ["give back scratch", "give back wire"]
        assert texts(reduction.finish()) == ["wait", "sum scratch 4 parts kept", *given]
        reduction.reduce(0)
        assert "sum scratch 4 parts added to kept" in texts(reduction.finish())


def test_ranks_gather_what_others_have_summed_in_order() -> None:
    replicated, replicas = in_order(0), in_order(3, num_replicas=2)
    replicated.reduce(0)
    assert texts(replicated.finish()) == [
        "wait",
        "sum scratch 4 parts kept",
        f"gather_sums state kept {FP32}",
        "give back scratch",
        "give back wire",
        "wait",
    ]
    replicas.reduce(0)
    assert texts(replicas.finish()) == [
        "wait",
        f"take sums {2 * FP32 // WORLD}",
        "sum scratch 4 parts sums",
        f"reduce_scatter replicas across {FP32 // WORLD}",
        "wait",
        "sum across 2 parts kept",
        f"gather_sums replicas kept {FP32 // WORLD}",
        "give back sums",
        "give back scratch",
        "give back wire",
        "wait",
    ]


def test_sums_in_order_that_are_kept_on_the_host_come_from_a_block() -> None:
    reduction = in_order(0, gradients="cpu")
    reduction.reduce(0)
    assert texts(reduction.finish()) == [
        "wait",
        f"take sums {FP32}",
        "sum scratch 4 parts sums",
        f"gather_sums state sums {FP32}",
        "wait",
        f"offload sums {FP32}",
        "give back sums when it is copied",
        "give back scratch",
        "give back wire",
    ]


def test_a_gradient_is_scaled_once_however_it_comes_to_the_wire() -> None:
    """Each way multiplies to the whole scale."""
    plain, ordered = make(2, hold_full=True), in_order(2, hold_full=True)
    for reduction, direct, last in ((plain, "all", "none"), (ordered, "packed", "rest")):
        packed = {step.kind: step.scale for step in reduction.reduce(0)}
        assert packed["pack"] == direct
        assert {step.scale for step in reduction.finish() if step.kind == "sum"} <= {last}
        assert {step.scale for step in reduction.reduce(0, False) if step.kind == "pack"} == {"all"}
        scales = {step.kind: step.scale for step in reduction.reduce(0)}
        assert scales["pack"] == "all"
        assert scales.get("cast") == (None if direct == "all" else "rest undone")
        reduction.finish()
