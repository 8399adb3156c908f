"""Models that end while ranks wait for each other, that never began, or outlive their group."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from zerocore.common.groups import new_group


def sharded(stage: int) -> nn.Module:
    torch.manual_seed(0)
    return zerocore.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), stage=stage)


def free_while_another_rank_is_slow() -> float:
    """How long Python's other threads stood still while rank 0's model ended."""
    model = sharded(0)
    model(torch.ones(2, 8)).sum().backward()
    longest, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        before = time.monotonic()
        while not ended.wait(0.02):
            longest = max(longest, time.monotonic() - before)
            before = time.monotonic()
        longest = max(longest, time.monotonic() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    if dist.get_rank() == 1:
        time.sleep(3)
    output = model(torch.ones(2, 8))
    del model, output
    gc.collect()
    ended.set()
    thread.join()
    return longest


def test_a_model_ends_without_the_interpreters_lock() -> None:
    longest = run_ranks(free_while_another_rank_is_slow, 2)[0]
    assert longest < 2  # the other rank comes after 3 s


def fail_to_shard(stage: int) -> list[str]:
    """The warnings about a model whose own ``init_fn`` raises."""

    def fail(module: nn.Module) -> None:
        raise ValueError("bad init")

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="bad init"):
            zerocore.shard(model, stage=stage, init_fn=fail)
        del model
        gc.collect()
    return [str(each.message) for each in said]


def test_a_model_that_never_began_says_nothing(stage: int) -> None:
    for said in run_ranks(fail_to_shard, 2, stage):
        assert not any("failed while the model was freed" in text for text in said), said


def use_after_the_group(folder: Path) -> None:
    model = sharded(3)
    checkpoints = zerocore.Checkpoints(folder, model)
    checkpoints.save(1).wait()
    dist.destroy_process_group()
    uses = (
        lambda: checkpoints.save(2).wait(),
        checkpoints.load,
        lambda: zerocore.clip_grad_norm_(model, 1.0),
        lambda: model.load_state_dict(model.state_dict()),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="process group of this model's ranks was destroyed"):
            use()


def test_uses_behind_the_end_of_the_group(tmp_path: Path) -> None:
    for outcome in run_to_end(use_after_the_group, 2, tmp_path):
        assert outcome.error is None, outcome.error


def make_groups_in_threads() -> list[str]:
    """The names that torch gives to the program's groups while zerocore makes groups of its own."""
    sharded(3)
    begin, names = threading.Barrier(2), []

    def make() -> None:
        begin.wait()
        for _ in range(20):
            names.append(dist.distributed_c10d._process_group_name([], use_hashed_name=True))

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make)
        begin.wait()
        for number in range(5):
            group = new_group([dist.get_rank()], f"own_{number}", backend="gloo")
            assert group.group_name.startswith(f"own_{number}")
        made.result()
    with pytest.raises((ValueError, AssertionError), match="no_backend"):
        new_group([dist.get_rank()], "own", backend="no_backend")
    names.append(dist.distributed_c10d._process_group_name([], use_hashed_name=True))
    return names


def test_names_of_groups_are_the_threads_own() -> None:
    for names in run_ranks(make_groups_in_threads, 2):
        assert not any(name.startswith("own") for name in names)
