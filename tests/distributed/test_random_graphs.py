"""Random models train as in one process that does every rank's part.

Each graph is trained at one of the stages. `python -m tests.distributed.test_random_graphs FIRST
COUNT [SHAPE ...]` trains each at all of them, and with `--one-stage` at one, too; a SHAPE is a
number of ranks, or replicas x shards. `30000 10000 --one-stage` is the run of CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.random_graphs import build, choose_units, codes_of, total_loss
from tests.distributed.random_runs import (
    BETWEEN,
    KINDS,
    MAX_NORM,
    Event,
    Planned,
    Result,
    backward_unless_it_waits,
    batch,
    events_of,
    failing_backward,
    failing_forward,
    look_between,
    make_optimizer,
    mode,
    reference,
)
from tests.distributed.random_seeds import (
    SHAPES,
    begin,
    check,
    parser_of,
    references,
    seeds_of,
    train_all,
    world_of,
)
from tests.model.joined import joined
from zerocore.common.alarm import STALL_SECONDS

GRAPHS_OF_A_SHAPE = 52


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """One for all graphs: its groups take as long to make as a graph does to train."""
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


NEAR = ("regather", "replicas_share")


def options_of(seed: int, stage: int, shape: str) -> dict[str, Any]:
    """How a model is sharded, by its seed."""
    rng = random.Random(seed + 3)
    replicas, _, shards = shape.rpartition("x")
    options: dict[str, Any] = {}
    communication: dict[str, Any] = {
        "prefetch": rng.randrange(3),
        "reductions_in_flight": 1 + seed % 3,
        "registered": seed % 2 == 1,
        "accumulate": rng.choice(["sharded", "sharded", "full"]),
    }
    more = rng.choice(["", "", "offload", "overlap_reductions", "retain_last"])
    if more == "offload":
        options[more] = zerocore.Offload(parameters="cpu" if stage == 3 else "device")
    elif more and (stage == 3 or more == "overlap_reductions"):
        communication[more] = False
    if replicas:
        options["group"] = mesh_of(int(replicas), int(shards))
        if seed % 3 == 0 and stage > 0 and more != "offload":
            communication["replicas_share"] = "optimizer"
    if (
        stage == 3
        and shards == "4"
        and more in ("", "retain_last")
        and "replicas_share" not in communication
    ):
        communication["regather"] = rng.choice([None, 2])
    return {**options, "communication": zerocore.Communication(**communication)}


def shard(
    seed: int,
    model: nn.Module,
    candidates: list[nn.Module],
    communication: zerocore.Communication,
    **options: Any,
) -> None:
    if codes_of(model):  # near ranks refuse changes in place
        communication = replace(communication, **dict.fromkeys(NEAR))
    options["communication"] = communication
    with joined(seed % 2 << 20):
        try:
            zerocore.shard(model, units=choose_units(seed, candidates), **options)
        except (
            ValueError
        ) as error:  # shared modules leave one of the chosen ones without parameters
            assert "units overlap" in str(error)
            zerocore.shard(model, **options)


def train(seed: int, stage: int, shape: str) -> Result:
    """This rank's part of the run; of the numbers those of this rank."""
    model, clock, candidates = build(seed)
    shard(seed, model, candidates, stage=stage, **options_of(seed, stage, shape))
    optimizer = make_optimizer(model)
    rank = dist.get_rank()
    numbers: list[float] = []
    waiting: Any = 0.0
    for step, event in enumerate(events_of(seed)):
        clock[:] = [step, rank, not event.kind.startswith("fail")]
        if event.kind.startswith("fail"):
            fail(model, clock, event, seed)
            optimizer.zero_grad()
            waiting = 0.0
            continue
        with zerocore.no_sync(model) if event.held else nullcontext():
            with mode(model, event):
                loss = total_loss(model, batch(seed, step, rank))
            numbers.append(loss.item())
            numbers += look_between(model, clock, event, batch(seed, step, rank), rank)
            if event.kind == "train":
                waiting = backward_unless_it_waits(waiting + loss, event)
        if event.update:
            numbers.append(zerocore.clip_grad_norm_(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return Result([numbers], zerocore.full_state_dict(model, rank0_only=False))


def fail(model: nn.Module, clock: list[int], event: Event, seed: int) -> None:
    """A step that all ranks leave by an exception, or skip because one of them had one."""
    inputs = batch(seed, clock[0], dist.get_rank())
    if event.kind == "fail_backward":
        clock[1] = 0  # where a backward may fail all ranks must have come the same way
        with failing_backward(model, event.place) as backward, pytest.raises(Planned):
            backward(total_loss(model, inputs))
    elif event.kind == "fail_one" and event.place % dist.get_world_size() != dist.get_rank():
        total_loss(model, inputs)
    else:
        with failing_forward(model, event.place), mode(model, event), pytest.raises(Planned):
            total_loss(model, inputs)


def compare(seeds: range, shape: str, every_stage: bool) -> None:
    """Trains graphs at every stage, or each at one, in turn."""
    os.environ[STALL_SECONDS] = "20"
    for seed, right in references(reference, seeds).items():
        for stage in range(4) if every_stage else (seed % 4,):
            begin(seed, f"stage {stage}, shape {shape}")
            check(train(seed, stage, shape), right, rtol=1e-7, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_random_graphs_train_as_one_process(shape: str) -> None:
    seeds = seeds_of(SHAPES.index(shape), GRAPHS_OF_A_SHAPE)
    run_ranks(compare, world_of(shape), seeds, shape, False, timeout=240)


# Calls of a unit that nest on some ranks only, and a checkpoint whose backward begins with a loss
# inside of it, as an evaluation in between has taken other ways; and units that a backward without
# sync goes through, but not the next one with it; checkpoints in several forwards of one backward.
FOUND = [(72208, "4"), (73070, "3"), (541320, "2"), (550911, "4")]


@pytest.mark.parametrize(("seed", "shape"), FOUND)
def test_graphs_that_went_wrong_once(seed: int, shape: str) -> None:
    run_ranks(compare, world_of(shape), range(seed, seed + 1), shape, True, timeout=200)


def test_the_graphs_have_everything() -> None:
    seeds = range(len(SHAPES) * GRAPHS_OF_A_SHAPE)
    plans = [
        what
        for seed in seeds
        for module in build(seed)[0].modules()
        for what, _ in getattr(module, "plan", nn.Identity()).__dict__.get("steps", ())
    ]
    wanted = {"call", "twice", "sometimes", "checkpoint", "reentrant", "read", "aux", "detach"}
    wanted.add("routed")
    assert set(plans) == wanted
    events = [event for seed in seeds for event in events_of(seed)]
    assert {event.kind for event in events} == set(KINDS)
    assert {event.between for event in events} == {"", *BETWEEN}
    assert {(event.held, event.update) for event in events} == {(0, 0), (0, 1), (1, 0)}


def main() -> bool:
    """Trains random graphs and prints the seeds of those that went wrong."""
    parser = parser_of(main.__doc__, SHAPES)
    parser.add_argument("--one-stage", action="store_true", help="the one of the seed, not all")
    options = parser.parse_args()
    return train_all(compare, options, options.shapes, not options.one_stage)


if __name__ == "__main__":
    sys.exit(not main())
