"""Random models train as in one process that does every rank's part.

Each graph is trained at one of the stages. `python -m tests.distributed.test_random_graphs FIRST
COUNT [SHAPE ...]` trains each at all of them, and with `--one-stage` at one, too; a SHAPE is a
number of ranks, or replicas x shards. `30000 10000 --one-stage` is the run of CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.distributed.harness import RanksFailed, run_ranks
from tests.distributed.random_graphs import build, choose_units, total_loss
from tests.distributed.random_runs import (
    BETWEEN,
    KINDS,
    MAX_NORM,
    Event,
    Planned,
    Result,
    batch,
    events_of,
    failing_backward,
    failing_forward,
    look_between,
    make_optimizer,
    mode,
    reference,
)
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("1", "2", "3", "4", "2x2")
GRAPHS_OF_A_SHAPE = 40


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """One for all graphs: its groups take as long to make as a graph does to train."""
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def options_of(seed: int, shape: str) -> dict[str, Any]:
    """How a model is sharded, by its seed."""
    rng = random.Random(seed + 3)
    replicas, _, shards = shape.rpartition("x")
    options: dict[str, Any] = {
        "prefetch": rng.randrange(3),
        "accumulate": rng.choice([None, None, "full"]),
    }
    if replicas:
        options["group"] = mesh_of(int(replicas), int(shards))
    return {name: value for name, value in options.items() if value is not None}


def shard(seed: int, model: nn.Module, candidates: list[nn.Module], **options: Any) -> None:
    try:
        zerocore.shard(model, units=choose_units(seed, candidates), **options)
    except ValueError as error:  # shared modules leave one of the chosen ones without parameters
        assert "units overlap" in str(error)
        zerocore.shard(model, **options)


def train(seed: int, stage: int, shape: str) -> Result:
    """This rank's part of the run; of the numbers those of this rank."""
    model, clock, candidates = build(seed)
    shard(seed, model, candidates, stage=stage, **options_of(seed, shape))
    optimizer = make_optimizer(model)
    rank = dist.get_rank()
    numbers: list[float] = []
    for step, event in enumerate(events_of(seed)):
        clock[:] = [step, rank, not event.kind.startswith("fail")]
        if event.kind.startswith("fail"):
            fail(model, clock, event, seed)
            optimizer.zero_grad()
            continue
        with zerocore.no_sync(model) if event.held else nullcontext():
            with mode(model, event):
                loss = total_loss(model, batch(seed, step, rank))
            numbers.append(loss.item())
            numbers += look_between(model, clock, event, batch(seed, step, rank), (rank, rank))
            if event.kind == "train":
                loss.backward()
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


def compare(first: int, count: int, shape: str, every_stage: bool) -> None:
    """Trains `count` graphs at every stage, or each at one, in turn."""
    os.environ[STALL_SECONDS] = "20"
    expected = references(first, count)
    for seed, right in expected.items():
        for stage in range(4) if every_stage else (seed % 4,):
            print(f"graph {seed} at stage {stage}, shape {shape}", flush=True)  # if a rank fails
            found = train(seed, stage, shape)
            numbers = right.numbers[dist.get_rank()]
            torch.testing.assert_close(found.numbers[0], numbers, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(found.state, right.state, rtol=1e-7, atol=1e-9)


def references(first: int, count: int) -> dict[int, Result]:
    """Each rank computes some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {seed: reference(seed, size) for seed in range(first + rank, first + count, size)}
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    merged = {seed: result for part in parts for seed, result in part.items()}
    return dict(sorted(merged.items()))


def world_of(shape: str) -> int:
    replicas, _, shards = shape.rpartition("x")
    return int(replicas or 1) * int(shards)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_graphs_train_as_one_process(shape: str) -> None:
    first = SHAPES.index(shape) * GRAPHS_OF_A_SHAPE
    run_ranks(compare, world_of(shape), first, GRAPHS_OF_A_SHAPE, shape, False, timeout=200)


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


def train_block(first: int, count: int, shape: str, every_stage: bool) -> list[int]:
    """Trains graphs in one start of the ranks, and in more where one fails; seeds that failed."""
    failed: list[int] = []
    end = first + count
    while first < end:
        limit = 60.0 + 20.0 * (end - first)
        try:
            run_ranks(
                compare, world_of(shape), first, end - first, shape, every_stage, timeout=limit
            )
            break
        except RanksFailed as error:
            print(error, flush=True)
            begun = [int(seed) for seed in re.findall(r"^graph (\d+) at stage", str(error), re.M)]
            failed.append(max(begun, default=first))
            print(f"graph {failed[-1]} failed, shape {shape}", flush=True)
            first = failed[-1] + 1
    return failed


def main(options: argparse.Namespace) -> bool:
    """Prints the seeds of graphs that went wrong, and how many there were; whether none did."""
    failed: list[int] = []
    end = options.first + options.count
    for index, first in enumerate(range(options.first, end, options.block)):
        count = min(options.block, end - first)
        shape = options.shapes[index % len(options.shapes)]
        failed += train_block(first, count, shape, not options.one_stage)
        done = first + count - options.first
        print(f"{done} graphs, {len(failed)} failed: {failed}", flush=True)
    print(f"{options.count} graphs, {len(failed)} failed")
    return not failed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("first", type=int, help="seed of the first graph")
    parser.add_argument("count", type=int)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="shape")
    parser.add_argument("--one-stage", action="store_true", help="the one of the seed, not all")
    parser.add_argument("--block", type=int, default=50, help="graphs in one start of the ranks")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(not main(parse_arguments()))
