"""Links, quantities with units, and the predicted step: exact on schedules counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from zerocore._C import CallEvent, PlannedEvent
from zerocore.common import quantities
from zerocore.common.links import PRESETS, Link, find_link, traffic_nbytes
from zerocore.common.parsing import parse_nbytes
from zerocore.planning.step_time import Timing, predict_timing

ORDER = tuple(CallEvent(enter, unit) for unit in range(3) for enter in (True, False))
NUM_MOMENTS = 2 * len(ORDER) + 1
SECOND = Link("slow", 1.0, 0.0)  # one byte a second


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * 2**30), ("80 gb", 80 * 10**9), ("1.5KiB", 1536), (7, 7), ("12", 12)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


def test_bandwidths_times_and_rates() -> None:
    assert quantities.parse_bandwidth("400Gbit/s") == 50e9
    assert quantities.parse_bandwidth("450GB/s") == 450e9
    assert quantities.parse_seconds("12us") == pytest.approx(12e-6)
    assert quantities.parse_flops("400TFLOP/s") == quantities.parse_flops("400 tflops") == 400e12


@pytest.mark.parametrize("text", ["fast", "GiB", "-1GiB", "1 GiB/s", "nan", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory must be"):
        parse_nbytes(text)


def test_text_of_quantities() -> None:
    assert quantities.format_nbytes(38.5e9) == "38.50 GB"
    assert quantities.format_nbytes(-1.12e12) == "-1.12 TB"
    assert quantities.format_nbytes(12) == "12 B"
    assert quantities.format_flops(2.2143e15) == "2.21 PFLOP"
    assert quantities.format_flops(123) == "123 FLOP"
    assert quantities.format_seconds(0.0125) == "12.5 ms"


def test_links_by_name_and_by_text() -> None:
    assert find_link("ib400") is PRESETS["ib400"]
    assert all(link.source for link in PRESETS.values())
    link = find_link("450GB/s,12us")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (450e9, pytest.approx(12e-6))
    assert find_link("450GB/s").latency_s == find_link(450e9).latency_s == pytest.approx(12e-6)
    with pytest.raises(ValueError, match="link 'x': bandwidth must be positive"):
        Link("x", 0.0, 0.0)
    with pytest.raises(ValueError, match="link must be one of nvlink4, nvlink5"):
        find_link("carrier pigeon")


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    parts = [traffic_nbytes(op, 800, 8) for op in ("reduce_scatter", "all_gather")]
    assert parts == [700, 700]
    assert traffic_nbytes("all_reduce", 800, 8) == sum(parts)
    assert Link("x", 100.0, 5.0).seconds("all_gather", 800, 8) == 12.0


def event(op: str, unit: int, moment: int, nbytes: int, axis: str = "state") -> PlannedEvent:
    made = SimpleNamespace(
        op=op, unit=unit, nbytes=nbytes, pool_nbytes=0, moment=moment, axis=axis, num_ranks=2
    )
    return cast(PlannedEvent, made)


def gather(unit: int, moment: int, nbytes: int) -> PlannedEvent:
    return event("all_gather", unit, moment, nbytes)


def step(
    events: list[PlannedEvent], flops: tuple[int, ...], replica_link: Link | None = None
) -> Timing:
    return predict_timing(events, ORDER, flops, SECOND, replica_link)


def at(**flops: int) -> tuple[int, ...]:
    values = [0] * NUM_MOMENTS
    for moment, value in flops.items():
        values[int(moment[1:])] = value
    return tuple(values)


def test_a_gather_ahead_hides_behind_compute() -> None:
    """Unit 0 is gathered in 3 s, then computes for 10 while unit 1 is gathered in 4."""
    flops = at(m0=10, m2=10)
    timing = step([gather(0, 0, 6), gather(1, 0, 8)], flops)
    assert timing.communication_s == 7
    assert timing.compute_s == 20
    assert timing.step_s == 23
    assert timing.exposed_s == 3
    assert timing.bound_s == 20
    assert timing.hidden == pytest.approx(4 / 7)


def test_a_gather_on_demand_hides_nothing() -> None:
    timing = step([gather(0, 0, 6), gather(1, 2, 8)], at(m0=10, m2=10))
    assert timing.step_s == 27
    assert timing.hidden == 0


def test_a_reduction_waits_for_the_one_before() -> None:
    reduces = [event("reduce_scatter", unit, moment, 20) for unit, moment in ((2, 7), (1, 9))]
    timing = step(reduces, at(m7=4, m9=3))
    assert timing.step_s == 20  # 10 s each; the second is issued when the first is done
    assert timing.exposed_s == 13
    assert step(reduces, at(m7=4, m9=3, m11=20)).step_s == 33  # and so is what is computed then


def test_a_sum_over_replicas_leaves_the_link_to_gathers() -> None:
    """10 s of reduce-scatter, 10 of all-reduce behind it, 4 of a gather that unit 0 waits for."""
    events = [
        event("reduce_scatter", 2, 7, 20),
        event("all_reduce", 2, 7, 10, axis="replicas"),
        gather(0, 8, 8),
    ]
    timing = step(events, at(m10=1), Link("other", 1.0, 0.0))
    assert timing == Timing("slow + other", 24, 1, step_s=20, across_s=10)
    assert timing.bound_s == 14
    timing = step(events, at(m10=1))
    assert timing == step(events, at(m10=1), SECOND) == Timing("slow", 24, 1, step_s=25)
    assert timing.bound_s == 24


def test_a_reduction_waits_for_the_sum_over_replicas_before() -> None:
    events = [
        event("reduce_scatter", 2, 7, 20),
        event("all_reduce", 2, 7, 30, axis="replicas"),
        event("reduce_scatter", 1, 9, 20),
    ]
    assert step(events, at(m7=4), Link("other", 1.0, 0.0)).step_s == 10 + 30 + 10


def test_no_communication_is_all_hidden() -> None:
    timing = step([], at(m0=5))
    assert (timing.step_s, timing.hidden) == (5, 1.0)
