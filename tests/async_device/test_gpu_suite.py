"""Runs the tests of `tests/gpu` on real ranks of the device instead of an emulated link."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.async_device.training import start
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.gpu import test_delays, test_events, test_parity, test_steady_state
from tests.gpu.training import PRECISIONS, VARIANTS

Case = dict[str, Any]
STAGES = range(4)
DELAYED = ("plain", "all", "accumulates_sharded", "bf16_reduced", "bf16_full")


def run_cases(test: Callable[..., None], cases: list[Case], fixture: str, share: float) -> int:
    """Runs all cases on this rank; an error names the case that failed."""
    device, extension = start(on_device=True)
    extension.set_delays(1, share, 300)
    for case in cases:
        try:
            test(**{fixture: device}, **case)
        except Exception as error:
            raise AssertionError(f"{test.__name__} of {case}") from error
    return len(cases)


def check(
    test: Callable[..., None],
    num_ranks: int,
    cases: Iterable[Case],
    fixture: str = "device",
    share: float = 0.1,
) -> None:
    run_ranks(
        run_cases, num_ranks, test, list(cases), fixture, share, launch="torchrun", timeout=240
    )


def parity_cases(variants: Iterable[Any], by_day: bool) -> list[Case]:
    """Returns the first and last variant at every stage, others at 2 and 3; prefetches alternate.

    By day, only the first variant at every stage, others at 2 or 3.
    """
    prefetch, turn = itertools.cycle(range(3)), itertools.cycle([(3,), (2,)])
    at_all = (VARIANTS[0],) if by_day else (VARIANTS[0], VARIANTS[-1])
    return [
        {"variant": variant, "stage": stage, "prefetch": next(prefetch)}
        for variant in variants
        for stage in (STAGES if variant in at_all else next(turn) if by_day else (2, 3))
    ]


@pytest.mark.parametrize(
    ("num_ranks", "variants", "by_day"),
    [*by_night((1, VARIANTS[-1:], False), (2, VARIANTS, False)), (2, VARIANTS, True)],
)
def test_parity_of_stages(num_ranks: int, variants: tuple[Any, ...], by_day: bool) -> None:
    check(test_parity.test_stages, num_ranks, parity_cases(variants, by_day))


@pytest.mark.nightly
def test_parity_in_mixed_precision() -> None:
    test = test_parity.test_stages_agree_in_mixed_precision
    check(test, 2, [{"variant": variant} for variant in PRECISIONS])


@pytest.mark.nightly
def test_parity_after_failures() -> None:
    cases = [
        {"stage": stage, "where": where, "at": 2}
        for stage in (0, 3)
        for where in ("forward", "backward")
    ]
    check(test_parity.test_a_failed_step_leaves_the_model_usable, 2, cases)
    check(test_parity.test_a_failed_backward_needs_no_reset, 2, [{}])
    check(test_parity.test_from_the_meta_device, 2, [{}])


@pytest.mark.nightly
def test_parity_on_another_stream() -> None:
    cases = [{"stage": stage} for stage in STAGES]
    check(test_parity.test_on_another_stream, 2, cases, fixture="cuda")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_ranks", "names", "stages"),
    [*by_night((3, ("plain",), [(3, 2)]), (2, DELAYED, [(3, 2)])), (2, DELAYED, [(3,), (2,)])],
)
def test_delays_change_nothing(
    num_ranks: int, names: tuple[str, ...], stages: list[tuple[int, ...]]
) -> None:
    """By day, cases take stage 3 or 2 in turn."""
    prefetch, turn = itertools.cycle(range(3)), itertools.cycle(stages)
    cases = [
        {"stage": stage, "prefetch": next(prefetch), "name": name}
        for name in names
        for stage in next(turn)
    ]
    check(test_delays.test_delays_change_nothing, num_ranks, cases, share=0.0)


@pytest.mark.parametrize(
    ("num_ranks", "stages"), [*by_night((1, [(3,)]), (2, [(1, 3)])), (2, [(3,), (1,)])]
)
def test_nothing_waits_or_allocates(num_ranks: int, stages: list[tuple[int, ...]]) -> None:
    """By day, cases take stage 3 or 1 in turn."""
    clips, turn = itertools.cycle(test_steady_state.CLIPS), itertools.cycle(stages)
    cases = [
        {"stage": stage, "variant": variant, "clip": next(clips)}
        for variant in (*VARIANTS, *PRECISIONS)
        for stage in next(turn)
    ]
    test = test_steady_state.test_nothing_waits_or_allocates
    check(test, num_ranks, cases, fixture="cuda", share=0.0)


@pytest.mark.nightly
def test_event_times() -> None:
    cases = [{"stage": stage, "prefetch": 1} for stage in STAGES]
    check(test_events.test_times_are_in_order, 2, cases)
    check(test_events.test_modules_are_on_the_clock_of_the_collectives, 2, [{}])
    check(test_events.test_a_trace_can_be_taken_twice, 2, [{}])
