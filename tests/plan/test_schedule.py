"""The schedule on random module graphs: residency, order on all ranks, bounds, no leaks."""

from __future__ import annotations

import random

import pytest

from tests.bindings import _C_testing
from tests.plan.driver import Call, Driver, order_of, random_tree
from zerocore._C import CallEvent

SEEDS = range(60)


def make(
    calls: list, num_units: int, prefetch: int, order: list[CallEvent] | None = None
) -> Driver:
    expected = order_of(calls) if order is None else order
    return Driver(_C_testing.Schedule(num_units, prefetch, True, True, expected))


def chain(num_units: int) -> list:
    return [(unit, ()) for unit in range(num_units)]


@pytest.mark.parametrize("prefetch", range(5))
@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed: int, prefetch: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(1, 8)
    calls = random_tree(rng, num_units)
    driver = make(calls, num_units, prefetch)
    for _ in range(2):
        driver.collectives.clear()
        driver.backward([driver.forward(calls)])
        reduced = [unit for op, unit in driver.collectives if op == "reduce"]
        assert sorted(reduced) == list(range(num_units))


@pytest.mark.parametrize("seed", SEEDS)
def test_changed_order_is_relearned(seed: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(2, 8)
    calls = random_tree(rng, num_units)
    order = order_of(chain(num_units))
    driver = make(calls, num_units, 1, order)
    driver.backward([driver.forward(calls)])
    expected = make(calls, num_units, 1)
    expected.backward([expected.forward(calls)])
    driver.collectives.clear()
    driver.backward([driver.forward(calls)])
    assert driver.collectives == expected.collectives


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_several_forwards_before_one_backward(seed: int, passes: int) -> None:
    rng = random.Random(seed)
    num_units = rng.randint(1, 6)
    calls = random_tree(rng, num_units)
    driver = make(calls, num_units, 1)
    tapes = [driver.forward(calls) for _ in range(passes)]
    driver.collectives.clear()
    driver.backward(tapes)
    reduced = [unit for op, unit in driver.collectives if op == "reduce"]
    assert sorted(reduced) == list(range(num_units))


@pytest.mark.parametrize("prefetch", range(4))
def test_transient_parameters_are_bounded(prefetch: int) -> None:
    driver = make(chain(12), 12, prefetch)
    driver.backward([driver.forward(chain(12))])
    assert driver.max_resident == prefetch + 1


def test_exact_events_of_a_chain() -> None:
    driver = make(chain(3), 3, 1)
    tape = driver.forward(chain(3))
    assert driver.collectives == [("unshard", 0), ("unshard", 1), ("unshard", 2)]
    assert driver.resident == {2}  # kept: the backward starts with it
    driver.collectives.clear()
    driver.backward([tape])
    assert driver.collectives == [
        ("unshard", 1),
        ("reduce", 2),
        ("unshard", 0),
        ("reduce", 1),
        ("reduce", 0),
    ]


def with_lookups(num_units: int, unread: set[int]) -> list[CallEvent]:
    """The order of a chain in which the backwards of some calls read no parameters."""
    units = range(num_units)
    pairs = [(CallEvent(True, u), CallEvent(False, u, reads=u not in unread)) for u in units]
    return [event for pair in pairs for event in pair]


def backward_of(driver: Driver, num_units: int, unread: set[int]) -> list[tuple[str, int]]:
    """The actions of a chain's backward, in which some calls read no parameters."""
    schedule, handles = driver.schedule, []
    driver.apply(schedule.begin_pass(True))
    for unit in range(num_units):
        driver.apply(schedule.enter(unit))
        left = schedule.exit(unit, reads=unit not in unread)
        handles.append(left.call)
        driver.apply(left.actions)
    driver.apply(schedule.end_pass())
    driver.collectives.clear()
    schedule.begin_backward()
    for unit in reversed(range(num_units)):
        for _ in range(2):  # a call may have two outputs
            driver.apply(schedule.pre_backward(handles[unit]))
            assert (unit in driver.resident) == (unit not in unread)
        driver.apply(schedule.ready(unit))
    driver.apply(schedule.end_backward())
    assert not driver.resident
    return driver.collectives


@pytest.mark.parametrize("prefetch", range(4))
@pytest.mark.parametrize("unread", [{0}, {4}, {2}, {1, 2}, {0, 3, 4}, set(range(5))])
def test_what_no_backward_reads_is_not_gathered(unread: set[int], prefetch: int) -> None:
    driver = make(chain(5), 5, prefetch, with_lookups(5, unread))
    for _ in range(3):
        issued = backward_of(driver, 5, unread)
        # Only the last call keeps its parameters from the forward, and only if they are read.
        gathers = [unit for unit in (4, 3, 2, 1, 0) if unit not in unread]
        kept = gathers[:1] if 4 not in unread else []
        assert [unit for op, unit in issued if op == "unshard"] == gathers[len(kept) :]
        assert [unit for op, unit in issued if op == "reduce"] == [4, 3, 2, 1, 0]
    assert driver.max_resident <= prefetch + 1


def test_exact_gathers_look_past_what_is_not_read() -> None:
    driver = make(chain(4), 4, 1, with_lookups(4, {2}))
    backward_of(driver, 4, {2})
    assert backward_of(driver, 4, {2}) == [
        ("unshard", 1),
        ("reduce", 3),
        ("reduce", 2),
        ("unshard", 0),
        ("reduce", 1),
        ("reduce", 0),
    ]


def test_all_calls_of_a_pass_read_where_one_reads_more_than_the_order_has() -> None:
    driver = make(chain(4), 4, 0, with_lookups(4, {0, 2}))
    for unread, gathered in (({0, 2}, [3, 1]), ({2}, [3, 2, 1, 0]), ({0, 1, 2}, [3, 1])):
        schedule, handles = driver.schedule, []
        driver.apply(schedule.begin_pass(True))
        for unit in range(4):
            driver.apply(schedule.enter(unit))
            left = schedule.exit(unit, reads=unit not in unread)
            handles.append(left.call)
            driver.apply(left.actions)
        driver.apply(schedule.end_pass())
        assert [e.unit for e in schedule.order if e.reads and not e.enter] == gathered[::-1]
        driver.collectives.clear()
        schedule.begin_backward()
        for unit in reversed(range(4)):
            driver.apply(schedule.pre_backward(handles[unit]))
        driver.apply(schedule.end_backward())
        assert [u for op, u in driver.collectives if op == "unshard"] == gathered[1:]


def test_without_grad_nothing_stays() -> None:
    driver = make(chain(3), 3, 2)
    driver.forward(chain(3), grad=False)
    assert not driver.resident


def test_a_forward_keeps_the_unit_that_the_one_before_has_retained() -> None:
    driver = make(chain(1), 1, prefetch=0)
    driver.forward(chain(1))
    driver.forward(chain(1))
    assert driver.collectives == [("unshard", 0)]


def test_unused_unit_is_reduced_in_its_turn() -> None:
    driver = make(chain(3), 3, 0)
    tape = driver.forward(chain(3))
    driver.collectives.clear()
    schedule = driver.schedule
    schedule.begin_backward()
    handles = {unit: handle for kind, unit, handle in tape if kind == "exit"}
    driver.apply(schedule.pre_backward(handles[2]))
    assert ("reduce", 2) not in driver.collectives  # unit 2 never reports its gradients
    driver.apply(schedule.pre_backward(handles[1]))
    assert driver.collectives == [("reduce", 2), ("unshard", 1)]


def test_abort_gives_everything_back() -> None:
    driver = make(chain(4), 4, 2)
    driver.apply(driver.schedule.begin_pass(True))
    driver.apply(driver.schedule.enter(0))
    driver.apply(driver.schedule.abort())
    assert not driver.resident
    driver.backward([driver.forward(chain(4))])


def test_stages_1_and_2_gather_once_after_an_update() -> None:
    schedule = _C_testing.Schedule(3, 1, True, False, order_of(chain(3)))
    driver = Driver(schedule, releases=False, resident={0, 1, 2})
    driver.backward([driver.forward(chain(3))])
    assert [op for op, _ in driver.collectives] == ["reduce"] * 3
    for unit in range(3):
        assert schedule.invalidate(unit) == []
        driver.resident.discard(unit)
    driver.collectives.clear()
    tape = driver.forward(chain(3))
    assert driver.collectives == [("unshard", 0), ("unshard", 1), ("unshard", 2)]
    driver.backward([tape])


def reduced(driver: Driver) -> list[int]:
    units = [unit for op, unit in driver.collectives if op == "reduce"]
    driver.collectives.clear()
    return units


def test_a_pass_whose_backward_never_comes_delays_reductions_once() -> None:
    driver = make(chain(3), 3, 1)
    for expected in ([0, 1, 2], [2, 1, 0]):  # at the end, in order of units; then in their turn
        driver.forward(chain(3))  # its output is dropped
        driver.backward([driver.forward(chain(3))])
        assert reduced(driver) == expected
        for unit in range(3):
            driver.apply(driver.schedule.invalidate(unit))


def test_two_passes_in_one_backward_are_reduced_once() -> None:
    driver = make(chain(3), 3, 1)
    for _ in range(2):
        driver.backward([driver.forward(chain(3)), driver.forward(chain(3))])
        assert reduced(driver) == [2, 1, 0]


def test_a_backward_for_other_gradients_does_not_reduce() -> None:
    driver = make(chain(3), 3, 1)
    driver.schedule.set_reduced(1, False)
    driver.backward([driver.forward(chain(3))])
    assert reduced(driver) == [2, 0]


def test_a_retained_pass_is_reduced_again() -> None:
    driver = make(chain(3), 3, 1)
    tape = driver.forward(chain(3))
    driver.backward([tape])
    driver.backward([driver.forward(chain(3))])
    driver.collectives.clear()
    driver.backward([tape])
    assert reduced(driver) == [2, 1, 0]


def test_a_unit_inside_of_itself_stays_until_the_outer_call_is_left() -> None:
    calls: list[Call] = [(0, ((1, ()), (0, ()), (1, ()))), (2, ())]
    driver = make(calls, 3, 1)
    for _ in range(3):
        driver.backward([driver.forward(calls)])
        assert sorted(reduced(driver)) == [0, 1, 2]


def test_calls_that_cross_the_learned_order_leave_nothing_behind() -> None:
    first: list[Call] = [(0, ((1, ()),)), (1, ((0, ()),)), (2, ())]
    second: list[Call] = [(1, ()), (0, ((2, ((1, ()),)),))]
    driver = make(first, 3, 1)
    for calls in (first, second, first, second, second):
        driver.backward([driver.forward(calls)])
        assert sorted(reduced(driver)) == [0, 1, 2]
