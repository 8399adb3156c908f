"""The trace of a run on a GPU: times come from its streams, and they fit together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import zerocore
from tests.gpu.training import VARIANTS, Stack, make_optimizer, peers, run_step, shard

# Events are read with this resolution (cudaEventElapsedTime: about half a microsecond each).
RESOLUTION_NS = 2_000
# Two clocks of the device are each tied to the host's with an error of some microseconds.
CLOCKS_NS = 200_000


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_times_are_in_order(device: torch.device, stage: int, prefetch: int) -> None:
    with peers():
        model = shard(Stack(VARIANTS[0]).to(device), stage, prefetch)
        optimizer = make_optimizer(model)
        for step in range(2):
            run_step(model, optimizer, step)
        with zerocore.reporting.record_events(model) as events:
            run_step(model, optimizer, 2)
        predicted = zerocore.planning.predict_events(model)
    collectives = [event for event in events if event.op not in ("unshard", "reshard")]
    assert [(event.op, event.unit, event.nbytes) for event in collectives] == predicted
    for event in collectives:
        assert 0 < event.issued_ns <= event.done_ns
        assert event.wait_ns >= 0
    if device.type != "cpu":
        streams = ({"all_gather"}, {"reduce_scatter", "all_reduce"})
        for ops in streams:
            one_stream = [event for event in collectives if event.op in ops]
            for earlier, later in pairwise(one_stream):
                assert later.issued_ns >= earlier.done_ns - RESOLUTION_NS


def test_modules_are_on_the_clock_of_the_collectives(device: torch.device) -> None:
    """A unit computes after its gather, and before its reduction, is done."""
    with peers():
        model = shard(Stack(VARIANTS[0]).to(device), stage=3)
        optimizer = make_optimizer(model)
        run_step(model, optimizer, 0)
        with zerocore.trace(model) as timeline:
            run_step(model, optimizer, 1)
    done: dict[tuple[str, str], int] = {}
    for box in timeline.boxes:
        assert box.start_ns <= box.end_ns
        done.setdefault((box.kind, box.label), box.end_ns)
    computed = {box.label for box in timeline.boxes if box.lane == "compute" and box.label}
    reduced = {label for kind, label in done if kind == "reduce_scatter"}
    assert computed & reduced
    for label in computed & reduced:
        assert done["all_gather", label] <= done["forward", label] + CLOCKS_NS
        assert done["forward", label] <= done["reduce_scatter", label] + CLOCKS_NS


def test_a_trace_can_be_taken_twice(device: torch.device) -> None:
    """Each from its own start: the second begins after the first ended."""
    with peers():
        model = shard(Stack(VARIANTS[0]).to(device), stage=3)
        optimizer = make_optimizer(model)
        ends = []
        for step in range(3):
            with zerocore.reporting.record_events(model) as events:
                run_step(model, optimizer, step)
            done = [event for event in events if event.done_ns >= 0]
            assert done
            ends.append((min(e.issued_ns for e in done), max(e.done_ns for e in done)))
    for (_, end), (start, _) in pairwise(ends):
        assert start >= end - RESOLUTION_NS
