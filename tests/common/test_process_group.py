"""Where the ranks come from: torchrun, nothing at all, or a group that the caller made."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named, train_reference
from zerocore.common.groups import timeout_of

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def shard_under_torchrun() -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerocore").addHandler(handler)
    logging.getLogger("zerocore").setLevel(logging.INFO)
    assert not dist.is_initialized()
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build())
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)
    return "\n".join(records)


@pytest.mark.parametrize("ranks", [*by_night(1, 3), 2])
def test_under_torchrun_a_group_is_made_and_said(ranks: int) -> None:
    said = run_ranks(shard_under_torchrun, ranks, launch="torchrun")
    assert "gloo" in said[0] and str(ranks) in said[0]


def connections_of_models() -> list[int]:
    """To the store, behind each of three models."""
    counts = []
    models = []
    for _ in range(3):
        models.append(zerocore.shard(nn.Linear(3, 3)))
        counts.append(num_connections(int(os.environ["MASTER_PORT"])))
    return counts


def num_connections(port: int) -> int:
    """Of this process, to a server at that port."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            peer = socket.socket(fileno=os.dup(int(name))).getpeername()
        except OSError:  # no socket, or without a peer
            continue
        count += isinstance(peer, tuple) and peer[1] == port
    return count


def test_models_share_a_connection_to_the_store() -> None:
    """Each one that torch makes looks up names of hosts, which may take seconds."""
    for first, *others in run_ranks(connections_of_models, 2, launch="torchrun"):
        assert first > 1 and others == [first, first]


def shard_alone(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    assert not dist.is_initialized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerocore.reporting.record_events(model) as events:
        for step in range(3):
            accumulate(model, case, step, rank=0)
            zerocore.clip_grad_norm_(model, 1e6)
            optimizer.step()
            optimizer.zero_grad()
    assert not [event for event in events if event.op in COLLECTIVES]
    assert zerocore.planning.predict_events(model) == []
    expected = train_reference(case, 1, lambda p: torch.optim.SGD(p, lr=0.1), steps=3)
    state = zerocore.full_state_dict(model)
    torch.testing.assert_close(state, expected.state, rtol=0.0, atol=1e-5)


def test_alone_a_world_of_one_without_collectives(stage: int) -> None:
    run_ranks(shard_alone, 1, stage, launch="none")


def shard_in_subgroups(stage: int, kind: str) -> None:
    if kind == "mesh":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        given: object = mesh["shard"]
        group = mesh["shard"].get_group()
    else:
        members = {
            "halves": [(0, 1), (2, 3)],
            "strided": [(0, 2), (3, 1)],
            "single": [(0,), (1,), (2,), (3,)],
        }
        groups = [(ranks, dist.new_group(list(ranks))) for ranks in members[kind]]
        group = next(group for ranks, group in groups if dist.get_rank() in ranks)
        given = group
    case = case_named("scalars")
    model = zerocore.shard(case.seeded_build(), stage=stage, group=given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        accumulate(model, case, step, rank=dist.get_rank(group))
        optimizer.step()
        optimizer.zero_grad()
    size = dist.get_world_size(group)
    expected = train_reference(case, size, lambda p: torch.optim.SGD(p, lr=0.1), steps=2)
    state = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, expected.state, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("kind", ["halves", "strided", "single", "mesh"])
def test_group_given(stage: int, kind: str) -> None:
    run_ranks(shard_in_subgroups, 4, stage, kind)


def give_wrong_group() -> None:
    for wrong in ("gloo", 2):
        with pytest.raises((TypeError, ValueError), match="group"):
            zerocore.shard(torch.nn.Linear(2, 2), group=wrong)


def test_what_is_not_a_group() -> None:
    run_ranks(give_wrong_group, 1)


def shard_beside_other_groups(folder: str) -> None:
    for member in range(dist.get_world_size() - 1):  # the last rank is in none of them
        dist.new_group([member])
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), communication=zerocore.Communication(regather=2))
    zerocore.Checkpoints(folder, model).save(1).wait()
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_ranks_may_be_in_different_numbers_of_groups(tmp_path: Path) -> None:
    run_ranks(shard_beside_other_groups, 4, str(tmp_path), timeout=60)


def compare_timeouts(folder: Path) -> None:
    """Groups that zerocore makes wait as long as the program's, whatever torch's default is."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    model = zerocore.shard(nn.Linear(4, 4), group=mesh)
    optimizer = zerocore.optim.AdamW(model.parameters())
    zerocore.Checkpoints(folder, model, optimizer).save(1).wait()
    known: Any = dist.distributed_c10d._world.pg_map
    found = {group.group_desc: timeout_of(group) for group in known}
    assert {"zerocore_control", "zerocore_saves"} <= set(found), found
    own = {name: each for name, each in found.items() if name.startswith("zerocore")}
    assert set(own.values()) == {timeout_of(dist.group.WORLD)}, found


def test_timeouts(tmp_path: Path) -> None:
    run_ranks(compare_timeouts, 2, tmp_path)
